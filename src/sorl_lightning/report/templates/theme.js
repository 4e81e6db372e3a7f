"use strict";
// Before the first paint: the reader's own choice, else the system's.
(() => {
  let kept = null;
  try { kept = localStorage.getItem("sorl-theme"); } catch { /* a file may have no storage */ }
  const dark = kept ? kept === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
