"use strict";
// The trajectory browser: a list of which only the rows in sight exist, and one trajectory turn by turn.
const { rows, texts, shades } = DATA.browser;
const ROW = 46; // pixels, as in the style sheet
const list = document.getElementById("list");
const spacer = document.getElementById("spacer");
const detail = document.getElementById("detail");
const control = (id) => document.getElementById(id);
const text = (place) => (place < 0 ? "" : texts[place]);
const at = (column, place) => (Array.isArray(column) ? column[place] : column); // a constant column is one value
const whole = (turn, name) => Array.from({ length: name in turn.tokens ? turn.count : 0 }, (_, place) => at(turn.tokens[name], place));
let found = [];
let chosen = 0; // place in found
let shade = Object.keys(shades)[0];

// Filters

function haystack(row) {
  row.words ??= [text(row.task), ...row.turns.flatMap((turn) => [turn.tokens.piece.join(""), text(turn.observation)])].join("\n").toLowerCase();
  return row.words;
}

const tokensOf = (row) => row.turns.reduce((sum, turn) => sum + turn.count, 0);
const ORDERS = { reward: (a, b) => b.reward - a.reward, "-reward": (a, b) => a.reward - b.reward, length: (a, b) => tokensOf(b) - tokensOf(a) };

function filter() {
  const kept = found[chosen];
  const words = control("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const value = (id) => control(id)?.value ?? "";
  found = rows.filter((row) =>
    (value("by-run") === "" || row.run === Number(value("by-run"))) &&
    (value("by-collection") === "" || row.collection === Number(value("by-collection"))) &&
    (value("by-outcome") === "" || Number(row.success) === Number(value("by-outcome"))) &&
    (value("by-ending") === "" || row.ending === value("by-ending")) &&
    words.every((word) => haystack(row).includes(word)));
  if (ORDERS[value("order")]) found.sort(ORDERS[value("order")]);
  control("count").textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} trajectories`;
  spacer.style.height = `${found.length * ROW}px`;
  list.scrollTop = 0;
  choose(Math.max(0, found.indexOf(kept)));
}

function options(id, values, label = String) {
  const select = control(id);
  if (!select) return;
  select.replaceChildren(element("option", { value: "" }, "all"), ...[...new Set(values)].map((value) => element("option", { value }, label(value))));
}

// The list

function paint() {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
  const last = Math.min(found.length, first + Math.ceil(list.clientHeight / ROW) + 10);
  const made = [];
  for (let place = first; place < last; place += 1) {
    const row = found[place];
    const outcome = row.success ? "success" : "failure";
    const option = element("div", { class: "row", role: "option", id: `row-${place}`, "aria-selected": String(place === chosen), "aria-posinset": place + 1, "aria-setsize": found.length, style: `top:${place * ROW}px` },
      element("i", { class: `swatch hue${row.run}` }),
      element("span", { class: "name" }, text(row.task)),
      element("span", { class: "reward", title: "reward" }, row.reward.toFixed(3)),
      element("span", { class: "more" }, `${row.success ? "✓" : "✗"} ${outcome} · ${row.ending.replace("_", " ")} · ${row.turns.length} turns · collection ${row.collection} · group ${row.group}.${row.sibling}`));
    option.addEventListener("click", () => choose(place));
    made.push(option);
  }
  spacer.replaceChildren(...(found.length ? made : [element("p", { class: "none" }, "No trajectory fits these filters.")]));
  if (found.length) list.setAttribute("aria-activedescendant", `row-${chosen}`);
  else list.removeAttribute("aria-activedescendant");
}

function choose(place) {
  chosen = Math.max(0, Math.min(found.length - 1, place));
  const top = chosen * ROW;
  if (top < list.scrollTop) list.scrollTop = top;
  if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  paint();
  open(found[chosen]);
}

// Shades: the strength of a hue, from 0 to 1, and which of the two hues

const strengths = {};
function reach(name) {
  if (strengths[name] === undefined) {
    const values = rows.flatMap((row) => row.turns.flatMap((turn) => whole(turn, name))).filter((value) => value !== null);
    const sizes = values.map((value) => Math.abs(signed(name, value))).filter(Number.isFinite).sort((a, b) => a - b);
    strengths[name] = sizes.length ? sizes[Math.floor(0.99 * (sizes.length - 1))] || 1 : 1;
  }
  return strengths[name];
}

const signed = (name, value) => (shades[name][2] === "ratio" ? Math.log(value) : value);

function paintToken(span, turn, place) {
  span.classList.remove("clipped", "unmasked");
  span.style.background = "";
  delete span.dataset.strength;
  if (shade === "mask") {
    if (!at(turn.tokens.mask, place)) span.classList.add("unmasked");
    else if (at(turn.tokens.clipped ?? 0, place)) span.classList.add("clipped");
    return;
  }
  const value = at(turn.tokens[shade] ?? null, place);
  if (value === null) return;
  const size = signed(shade, value);
  const strength = Math.min(1, Math.abs(size) / reach(shade));
  span.dataset.strength = strength.toFixed(3);
  if (strength > 0) span.style.background = `rgb(var(${size > 0 ? "--above" : "--below"}) / ${(0.62 * strength).toFixed(3)})`;
}

function scale() {
  const [, unit, kind] = shades[shade];
  if (kind === "mask") return [element("span", {}, "plain: trained; wavy underline: clipped; hatched: not trained")];
  const far = reach(shade);
  const [low, middle, high] = kind === "ratio" ? [Math.exp(-far), 1, Math.exp(far)] : [-far, 0, far];
  const bar = element("i", { style: "background:linear-gradient(90deg,rgb(var(--below) / .62),transparent,rgb(var(--above) / .62))" });
  return [element("span", { class: "scale", title: "full colour from the 99th percentile on" }, short(low), bar, `${short(high)} ${unit}`), element("span", {}, `no colour at ${middle}`)];
}

// One trajectory

function open(row) {
  if (!row) return detail.replaceChildren();
  const facts = [["reward", short(row.reward)], ["outcome", row.success ? "success" : "failure"], ["ending", row.ending.replace("_", " ")], ["turns", `${row.turns.length} of ${row.turn_limit}`], ["collection", row.collection], ["group", `${row.group}, sibling ${row.sibling}`], ["version", `${row.policy_version} updates`], ["trained in update", row.update ?? "none"]];
  const select = element("select", { id: "shade" }, ...Object.entries(shades).map(([name, [label]]) => element("option", { value: name }, label)));
  select.value = shade;
  select.addEventListener("change", () => { shade = select.value; reshade(); });
  const header = element("header", {},
    element("h3", {}, element("i", { class: `swatch hue${row.run}` }), text(row.task)),
    element("div", { class: "facts" }, ...facts.map(([name, value]) => element("span", {}, `${name} `, element("b", {}, String(value))))),
    element("div", { class: "shading" }, element("label", {}, "Shade tokens by ", select), element("span", { id: "scale" })));
  const prompt = element("details", {}, element("summary", {}, "Prompt"), element("div", { class: "prompt", tabindex: 0 }, text(row.prompt)));
  const info = element("div", { id: "token", "aria-live": "polite" }, element("span", { class: "note" }, "Point at a token, or reach it by the arrow keys, for its figures."));
  detail.replaceChildren(header, element("div", { class: "turns" }, prompt, ...row.turns.map(turnOf)), info);
  detail.scrollTop = 0;
  reshade();
}

function turnOf(turn, number) {
  const facts = [turn.author, `${turn.count} tokens`, `prompt ${turn.prompt_tokens.toLocaleString("en")} tokens`, `reward ${short(turn.reward)}`, `${short(turn.seconds)} s`, turn.finish_reason === "length" ? "cut at a limit" : ""].filter(Boolean);
  const spans = Array.from({ length: turn.count }, (_, place) => {
    const piece = at(turn.tokens.piece, place);
    const span = element("span", { class: "token", tabindex: number === 0 && place === 0 ? 0 : -1, "data-turn": number, "data-token": place }, piece === "" ? "·" : piece.replaceAll("\n", "⏎\n"));
    span.addEventListener("focus", () => tell(turn, place));
    span.addEventListener("mouseenter", () => tell(turn, place));
    return span;
  });
  const parts = [element("h4", {}, `Turn ${number}`, ...facts.map((fact) => element("span", {}, fact))), element("div", { class: "tokens", role: "group", "aria-label": `Tokens of turn ${number}` }, ...spans)];
  if (turn.observation >= 0) parts.push(element("div", { class: "observation" }, text(turn.observation)));
  return element("div", { class: "turn" }, ...parts);
}

function tell(turn, place) {
  const value = (name) => at(turn.tokens[name] ?? null, place);
  const figures = Object.keys(shades).filter((name) => name !== "mask" && turn.tokens[name] !== undefined).map((name) => [shades[name][0].toLowerCase(), `${short(value(name))} ${shades[name][1]}`.trim()]);
  const state = !value("mask") ? "not trained" : value("clipped") ? "clipped" : "trained";
  const facts = [["token", JSON.stringify(value("piece"))], ["id", value("id")], ...figures, ["version", `${value("policy_version")} updates`], ["loss", state]];
  control("token").replaceChildren(element("div", { class: "facts" }, ...facts.map(([name, shown]) => element("span", {}, `${name} `, element("b", {}, String(shown))))));
}

function reshade() {
  const row = found[chosen];
  for (const span of detail.querySelectorAll(".token")) paintToken(span, row.turns[span.dataset.turn], Number(span.dataset.token));
  control("scale").replaceChildren(...scale());
}

// Keys

list.addEventListener("keydown", (event) => {
  const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 1);
  const places = { ArrowDown: chosen + 1, ArrowUp: chosen - 1, PageDown: chosen + page, PageUp: chosen - page, Home: 0, End: found.length - 1 };
  if (event.key in places) choose(places[event.key]);
  else if (event.key === "Enter") detail.querySelector(".token")?.focus();
  else return;
  event.preventDefault();
});
detail.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return list.focus();
  if (!event.target.classList.contains("token")) return;
  const all = [...detail.querySelectorAll(".token")];
  const here = all.indexOf(event.target);
  const turn = Number(event.target.dataset.turn);
  const goal = { ArrowRight: () => all[here + 1], ArrowLeft: () => all[here - 1], Home: () => all[0], End: () => all.at(-1), ArrowDown: () => all.find((token) => Number(token.dataset.turn) > turn), ArrowUp: () => all.find((token) => Number(token.dataset.turn) === turn - 1) }[event.key]?.();
  if (goal === undefined && !event.key.startsWith("Arrow")) return;
  event.preventDefault();
  if (!goal) return;
  event.target.tabIndex = -1;
  goal.tabIndex = 0;
  goal.focus();
});
addEventListener("keydown", (event) => {
  if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) return;
  event.preventDefault();
  control("search").focus();
});

options("by-run", rows.map((row) => row.run), (number) => DATA.runs[number].label);
options("by-collection", rows.map((row) => row.collection).sort((a, b) => a - b));
options("by-ending", rows.map((row) => row.ending), (ending) => ending.replace("_", " "));
for (const id of ["by-run", "by-collection", "by-outcome", "by-ending"]) control(id)?.addEventListener("change", filter);
control("order").addEventListener("change", () => { filter(); choose(0); });
control("search").addEventListener("input", filter);
control("reset").addEventListener("click", () => {
  control("search").value = "";
  for (const id of ["by-run", "by-collection", "by-outcome", "by-ending"]) if (control(id)) control(id).value = "";
  control("order").value = "log";
  filter();
});
list.addEventListener("scroll", paint);
new ResizeObserver(paint).observe(list);
filter();
