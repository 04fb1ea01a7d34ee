"""Checks the pages and renders them as HTML: `python docs/build.py <folder>`.

Relative links must lead to a file, and to a heading where they name one. Examples with `>>>` are run as doctests.
"""

import doctest
import re
import sys
from pathlib import Path

import markdown

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
HEADING_ID = re.compile(r'<h[1-6] id="([^"]+)"')

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ max-width: 50rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif; }}
pre {{ padding: .8rem; overflow-x: auto; background: #f4f4f4; }}
td, th {{ padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }}
</style>
<p><a href="index.html">d9d-lightning</a></p>
{body}
</html>
"""


def render(page: Path) -> str:
    """Render the body of a page as HTML; headings get ids."""
    text = page.read_text(encoding="utf-8")
    return markdown.markdown(text, extensions=["extra", "toc", "sane_lists"])


def broken_links(page: Path) -> list[str]:
    """Describe the relative links of a page that lead nowhere."""
    problems: list[str] = []
    text = FENCED_BLOCK.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            problems.append(f"{page.relative_to(ROOT)}: {link} does not exist")
        elif anchor and target.suffix == ".md" and anchor not in HEADING_ID.findall(render(target)):
            problems.append(f"{page.relative_to(ROOT)}: {link} names no heading of that page")
    return problems


def num_failed_examples(page: Path) -> int:
    """Run the `>>>` examples of a page; doctest prints the failures."""
    return doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS).failed


def write_page(page: Path, site: Path) -> None:
    """Write a page of `docs/` below `site`, with links to pages turned into links to HTML."""
    body = re.sub(r'href="(?!https?:)([^"]+)\.md(#[^"]*)?"', r'href="\1.html\2"', render(page))
    title = page.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
    target = site / page.relative_to(DOCS).with_suffix(".html")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(PAGE.format(title=title, body=body), encoding="utf-8")


def main(site: Path) -> int:
    """Check and write all pages; return the exit status."""
    pages = sorted(DOCS.rglob("*.md"))
    others = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("examples/*/README.md"))]
    problems = [problem for page in [*pages, *others] for problem in broken_links(page)]
    problems += [
        f"{page.relative_to(ROOT)}: an example fails, see above" for page in pages if num_failed_examples(page)
    ]
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    for page in pages:
        write_page(page, site)
    print(f"{len(pages)} pages in {site}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
