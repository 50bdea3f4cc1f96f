"""A synthetic encyclopedia of fictional places and people, questions about it, and BM25 search."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STARTS = "Al Bre Cor Dun El Far Gal Hol Is Jor Kel Lor Mar Nor Os Per Quil Ros Sel Tor Ul Ver Wes Yar Zel".split()
MIDDLES = "a an e en i in o or u ar el il".split()
ENDS = "bach berg bury dale den feld ford gate ham holm mar mere mont mouth stad ton vale ville wick wood".split()
FIRST_NAMES = "Adela Bertil Corin Dagny Edvin Fenja Gunnar Hedda Ivo Jorun Klara Leif Mirja Nelle Orla Petra".split()
CROPS = "barley flax hops lavender lentils oats plums rye saffron walnuts".split()
STONES = "basalt chalk granite limestone marble sandstone slate tuff".split()
TOPICS = ("year", "mayor", "height", "crop", "arches", "stone")
TITLE_WEIGHT = 3  # a word of the title counts like so many of the text


@dataclass(frozen=True)
class Page:
    """An article in markdown; sections begin with lines that start with #."""

    id: str
    title: str
    content: str

    @property
    def sections(self) -> dict[str, tuple[str, str]]:
        """Section id to its name and text.

        Text before the first heading is `page:introduction`, an article without headings `page:full`. Further headings
        of the same name have a number: `page:notes`, `page:notes_2`.
        """
        lead, *parts = re.split(r"(?m)^#+[ \t]*(.*)$", self.content)
        if not parts:
            return {f"{self.id}:full": ("full", lead.strip())}
        named = list(zip(parts[::2], parts[1::2], strict=True))
        found: dict[str, tuple[str, str]] = {}
        for name, text in [("Introduction", lead), *named] if lead.strip() else named:
            first = f"{self.id}:{to_id(name)}"
            keys = itertools.chain([first], (f"{first}_{number}" for number in itertools.count(2)))
            found[next(key for key in keys if key not in found)] = (name.strip(), text.strip())
        return found


def to_id(title: str) -> str:
    """Lower case, underscores for spaces."""
    return re.sub(r"\s+", "_", title.strip().lower())


class Search:
    """BM25 (Robertson & Zaragoza 2009, k1 = 1.5, b = 0.75) over the titles and texts of pages."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self.pages = list(pages)
        self.counts = [Counter(_words(f"{(page.title + ' ') * TITLE_WEIGHT}{page.content}")) for page in pages]
        self.lengths = [sum(count.values()) for count in self.counts]
        self.mean_length = sum(self.lengths) / max(len(self.lengths), 1)
        self.num_with = Counter(word for count in self.counts for word in count)

    def find(self, query: str, limit: int = 10) -> list[Page]:
        """The best `limit` pages that share a word with the query, best first."""
        words = set(_words(query))
        scores = [(self._score(words, i), -i) for i in range(len(self.pages))]
        return [self.pages[-i] for score, i in sorted(scores, reverse=True)[:limit] if score > 0]

    def _score(self, words: set[str], i: int) -> float:
        count, total = self.counts[i], len(self.pages)
        size = 1.5 * (0.25 + 0.75 * self.lengths[i] / self.mean_length)
        return sum(
            math.log(1 + (total - self.num_with[word] + 0.5) / (self.num_with[word] + 0.5))
            * (count[word] * 2.5 / (count[word] + size))
            for word in words
            if count[word]
        )


def build_pages(num_pages: int, seed: int, topics: Sequence[str] = TOPICS) -> tuple[list[Page], list[tuple[str, str]]]:
    """Articles on invented towns, and (question, answer) pairs, each answered by one section of one article.

    There is a question on every page for each of `topics`; `ValueError` for an unknown one.
    """
    if unknown := sorted(set(topics) - set(TOPICS)):
        raise ValueError(f"topics {', '.join(unknown)}: there are {', '.join(TOPICS)}")
    draw = random.Random(f"pages-{seed}")
    names = [start + middle + end for start in STARTS for middle in MIDDLES for end in ENDS]
    pages, questions = [], []
    for title in draw.sample(names, num_pages):
        mayor = f"{draw.choice(FIRST_NAMES)} {draw.choice(STARTS)}{draw.choice(MIDDLES)}n"
        river = f"{draw.choice(STARTS)}{draw.choice(MIDDLES)}r"
        year, height, arches = draw.randint(1020, 1890), draw.randint(40, 1900), draw.randint(3, 19)
        crop, stone = draw.choice(CROPS), draw.choice(STONES)
        content = (
            f"# Overview\n{title} is a town on the river {river}. Its best-known building is a bridge of {stone}.\n\n"
            f"# History\nThe town was founded in {year} by {mayor}, who became its first mayor.\n\n"
            f"# Geography\n{title} lies {height} metres above the sea. The river {river} flows through its old "
            f"quarter.\n\n# Economy\nThe farms around {title} are known for {crop}, sold at a market every autumn.\n\n"
            f"# Landmarks\nThe bridge of {stone} stands on {arches} arches.\n"
        )
        pages.append(Page(to_id(title), title, content))
        asked = {
            "year": (f"In which year was {title} founded?", str(year)),
            "mayor": (f"Who was the first mayor of {title}?", mayor),
            "height": (f"How many metres above the sea does {title} lie?", str(height)),
            "crop": (f"Which crop is {title} known for?", crop),
            "arches": (f"On how many arches does the bridge of {title} stand?", str(arches)),
            "stone": (f"What stone is the bridge of {title} made of?", stone),
        }
        questions += [asked[topic] for topic in TOPICS if topic in topics]
    return pages, questions


def read_pages(path: str) -> list[Page]:
    """Pages of a JSON lines file with the columns title, content and optionally id. `ValueError` for another file."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"corpus {path!r}: no such file; it should have JSON lines with title and content")
    pages = {}
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"corpus {path}, line {number} is not valid JSON: {error}") from error
        if not row.get("title") or row.get("content") is None:
            raise ValueError(f"corpus {path}, line {number}: a page needs title and content")
        page = Page(to_id(str(row.get("id") or row["title"])), str(row["title"]), str(row["content"]))
        if page.id in pages:
            raise ValueError(f"corpus {path}, line {number}: there are two pages {page.id}")
        pages[page.id] = page
    return list(pages.values())


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
