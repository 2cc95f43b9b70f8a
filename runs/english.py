"""
English text for a second verdict: the documentation of the Debian packages on this machine.

    python runs/english.py
    python prepare_c4.py --source=out/english.jsonl --tokenizer=bytes --data_dir=data/english \
        --max_val_tokens=1300000
    python runs/judge.py --data_dir=data/english --name=english --residual=ihc

Takes manual pages, web pages and plain text of packages that name their licence, and keeps the
paragraphs that look like English prose, each once. out/english.licences.json names the licences
and counts the characters of each package. The text depends on the packages that are installed: the
judge names it by its hash.
"""

import gzip
import hashlib
import html
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configurator import configure

OUT = ROOT / "out"
DPKG = Path("/var/lib/dpkg/info")
COPYRIGHT = "/usr/share/doc/{}/copyright"
PLACES = r"/usr/share/(man/man\d/|info/|perl|doc/(?!.*(changelog|copyright|NEWS\.Debian)))"
SUFFIXES = ("", ".txt", ".md", ".rst", ".html", ".info", ".pod", ".pm")
WORDS = frozenset("the of to and a in is that it for be as with are by on this or".split())
SHORTEST, LETTERS, COMMON = 40, 0.7, 0.12  # of a paragraph: characters, share of letters, of WORDS
LEAST = 500  # characters of a document


def licences(package):
    """The licences that the package's file debian/copyright names."""
    path = Path(COPYRIGHT.format(package))
    text = path.read_text(errors="replace") if path.exists() else ""
    named = re.findall(r"^License: *(\S.*)|/usr/share/common-licenses/([\w.+-]*\w)", text, re.M)
    return sorted({one or other for one, other in named})


def files_of(package):
    """The package's files of documentation, without links."""
    for listed in sorted({*DPKG.glob(f"{package}.list"), *DPKG.glob(f"{package}:*.list")}):
        for name in listed.read_text().splitlines():
            path = Path(name)
            if re.match(PLACES, name) and path.is_file() and not path.is_symlink():
                yield path


def text_of(path):
    """The text of a file without markup, or None."""
    raw, name = path.read_bytes(), path.name
    if name.endswith(".gz"):
        raw, name = gzip.decompress(raw), name[:-3]
    is_manual = "/man/" in str(path)
    if not is_manual and Path(name).suffix not in SUFFIXES:
        return None
    text = raw.decode(errors="replace")
    if is_manual:
        return from_roff(text)
    return from_html(text) if name.endswith(".html") else text


def from_roff(text):
    """A request that sets a font keeps its words. Every other request becomes an empty line."""
    text = re.sub(r"^[.'](B|I|BR|IR|RB|RI|BI|IB) (.*)", r"\2", text, flags=re.M)
    text = re.sub(r"^[.'].*", "\n", text, flags=re.M)
    text = re.sub(r"\\f(\[\w*\]|\(\w\w|\w)|\\[&/,|^]|\\s[-+]?\d", "", text)
    text = re.sub(r"\\(\[(lq|rq|dq)\]|\((lq|rq|dq))", '"', text)
    text = re.sub(r"\\(\[(aq|cq|oq)\]|\((aq|cq|oq))", "'", text)
    return text.replace(r"\-", "-").replace(r"\ ", " ").replace(r"\e", "\\")


def from_html(text):
    text = re.sub(r"(?is)<(script|style|pre)\b.*?</\1>|<!--.*?-->", "", text)
    text = re.sub(r"(?i)</?(p|li|dd|dt|div|tr|td|h\d|br|table|ul)\b[^>]*>", "\n\n", text)
    return html.unescape(re.sub(r"<[^>]*>", "", text))


def is_prose(paragraph):
    words = re.findall(r"[a-z]+", paragraph.lower())
    letters = sum(map(len, words)) / len(paragraph)
    common = sum(word in WORDS for word in words) / max(1, len(words))
    return paragraph.isascii() and letters > LETTERS and common > COMMON


def paragraphs_of(text):
    """The paragraphs of prose, each on one line."""
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = " ".join(paragraph.split())
        if len(paragraph) >= SHORTEST and is_prose(paragraph):
            yield paragraph


def main():
    configure(globals(), argv=sys.argv[1:])  # there are no settings: only --help
    if not DPKG.is_dir():
        raise SystemExit(f"{DPKG} does not exist: this needs a Debian system")
    OUT.mkdir(exist_ok=True)
    seen, report = set(), {}
    packages = sorted({path.stem.split(":")[0] for path in DPKG.glob("*.list")})
    with open(OUT / "english.jsonl", "w") as file:
        for package in packages:
            named, characters = licences(package), 0
            for path in files_of(package) if named else ():
                kept = []
                for paragraph in paragraphs_of(text_of(path) or ""):
                    name = hashlib.sha256(paragraph.lower().encode()).digest()[:8]
                    if name not in seen:
                        seen.add(name)
                        kept.append(paragraph)
                document = "\n".join(kept)
                if len(document) >= LEAST:
                    file.write(json.dumps({"text": document}) + "\n")
                    characters += len(document)
            if characters:
                report[package] = {"characters": characters, "licences": named}
    (OUT / "english.licences.json").write_text(json.dumps(report, indent=1))
    total = sum(each["characters"] for each in report.values())
    print(f"{total / 1e6:.1f} million characters of {len(report)} packages in out/english.jsonl")


if __name__ == "__main__":
    main()
