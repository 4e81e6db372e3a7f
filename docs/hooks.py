"""What the site has beyond this folder: pages from elsewhere in the repository, and one of the API a module."""

from __future__ import annotations

import ast
import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/sorl_lightning"
OUTER = {"callbacks/README.md": "switches.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]*)(#[^)\s]*)?\)")
PACKAGES = ("callbacks", "objectives", "rollout.environments", "rollout.engines")  # what each exports, on one page
ROOMS = ("functional", "rollout")  # a page a module
SINGLE = ("types", "module", "datamodule", "models", "lora", "critic", "teachers", "control", "strategies", "errors")


def on_files(files: Files, config: Any) -> Files:
    """Add pages from outside, and the reference."""
    for source, page in OUTER.items():
        files.append(File.generated(config, page, content=relinked((ROOT / source).read_text(), source)))
    reference = {name: [f"sorl_lightning.{name}"] for name in SINGLE}
    reference |= {name: exported(name) for name in PACKAGES}
    for room in ROOMS:
        modules = [path.stem for path in sorted((SOURCE / room).glob("*.py")) if not path.stem.startswith("_")]
        reference |= {f"{room}.{name}": [f"sorl_lightning.{room}.{name}"] for name in modules}
    for name, things in reference.items():
        text = "\n\n".join([f"# {name}", *(f"::: {thing}" for thing in things)])
        files.append(File.generated(config, f"api/{name}.md", content=text))
    rows = "".join(f"- [{name}]({name}.md)\n" for name in reference)
    files.append(File.generated(config, "api/index.md", content=f"# API reference\n\n{rows}"))
    return files


def exported(package: str) -> list[str]:
    """What a package's ``__init__`` imports from its modules, by where it is defined."""
    tree = ast.parse((SOURCE / package.replace(".", "/") / "__init__.py").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return [f"{node.module}.{alias.name}" for node in imports for alias in node.names]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links from the repository's places to the site's."""
    generated = page.file.generated_by is not None
    return markdown if generated else relinked(markdown, f"docs/{page.file.src_uri}")


def relinked(text: str, source: str) -> str:
    """``text`` of the file ``source`` with links to other files as the site has them; the rest loses its link."""
    here = Path(OUTER.get(source, source.removeprefix("docs/"))).parent

    def relink(match: re.Match[str]) -> str:
        bang, words, target, anchor = match.groups()
        if not target:
            return match[0]
        place = os.path.normpath(Path(source).parent / target)
        page = OUTER.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else None)
        if page is None or not (place in OUTER or (ROOT / place).is_file()):
            return words
        return f"{bang}[{words}]({os.path.relpath(page, here)}{anchor or ''})"

    return LINK.sub(relink, text)
