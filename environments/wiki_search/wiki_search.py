"""Answer questions with search tools over a small encyclopedia, offline or on custom pages."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset, load_dataset
from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).parent))  # the sibling module, also where this file is loaded by its path
from wiki_pages import TOPICS, Page, Search, build_pages, read_pages, to_id

SYSTEM_PROMPT = (
    "You answer questions with the help of an encyclopedia that you can only read through the tools. Search for a "
    "page, look at its sections, read the right one. When you know the answer, end your reply with a line of the form\n"
    "Answer: <the answer in a few words>"
)
JUDGE_PROMPT = """Is the response to this question both correct and coherent?

Question: {question}
Right answer: {answer}
Response: {response}

Reply with "yes" or "no" alone."""
EVAL_SHARE = 8  # one question in eight belongs to the eval split
TOOLS = ("search_pages", "view_sections", "read_section")
FINAL = re.compile(r"^\s*\**answer\**\s*:\s*(.*?)\s*$", re.IGNORECASE | re.MULTILINE)


def load_environment(
    max_turns: int = 10,
    num_train_examples: int = -1,
    num_eval_examples: int = 100,
    num_pages: int = 200,
    seed: int = 0,
    corpus: str | None = None,
    dataset_name: str | None = None,
    dataset_split: str = "train",
    topics: Sequence[str] = TOPICS,
    tools: Sequence[str] = TOOLS,
    system_prompt: str | None = SYSTEM_PROMPT,
    judge_model: str | None = None,
    judge_base_url: str | None = None,
    judge_api_key_var: str = "OPENAI_API_KEY",
) -> vf.Environment:
    """The model calls tools for up to `max_turns` turns and then answers.

    `num_pages` pages and a question on each for every one of `topics` are made from `seed`, unless `corpus` (JSON
    lines: title, content) and `dataset_name` (a hub dataset or JSON lines: question, answer) name others. `tools`
    leaves out tools. Reward: 1 when the last "Answer:" line is right, or, with `judge_model`, when this model says so.
    """
    if (corpus is None) != (dataset_name is None):
        raise ValueError("corpus and dataset_name go together: the pages, and the questions on them")
    if corpus is None:
        pages, questions = build_pages(num_pages, seed, topics)
    else:
        pages, questions = read_pages(corpus), _read_questions(str(dataset_name), dataset_split)
    train = [pair for pair in questions if _split_of(pair[0]) == "train"]
    held_out = [pair for pair in questions if _split_of(pair[0]) == "eval"]
    if unknown := sorted(set(tools) - set(TOOLS)):
        raise ValueError(f"tools {', '.join(unknown)}: there are {', '.join(TOOLS)}")
    every_tool = build_tools(pages)
    if judge_model is None:
        rubric = vf.Rubric(funcs=[answer_reward_func])
    else:
        rubric = _build_judge(judge_model, judge_base_url, judge_api_key_var)
    return vf.ToolEnv(
        tools=[every_tool[name] for name in tools],
        max_turns=max_turns,
        error_formatter=lambda error: f"Error: {error}",
        dataset=_to_dataset(train[: None if num_train_examples < 0 else num_train_examples], system_prompt),
        eval_dataset=_to_dataset(held_out[: None if num_eval_examples < 0 else num_eval_examples], system_prompt),
        rubric=rubric,
        env_id="wiki-search",
    )


def build_tools(pages: Sequence[Page]) -> dict[str, Callable[[str], str]]:
    """The three tools over these pages by name; each takes and returns text."""
    search = Search(pages)
    by_id = {page.id: page for page in pages}
    texts = {key: text for page in pages for key, (_, text) in page.sections.items()}

    def search_pages(query: str) -> str:
        """Find pages. Returns the ten best as JSON with page_id and title.

        Args:
            query: words to look for
        """
        return json.dumps([{"page_id": page.id, "title": page.title} for page in search.find(query)])

    def view_sections(page_id: str) -> str:
        """List the sections of a page as JSON with section_id and section_name.

        Args:
            page_id: a page_id of search_pages
        """
        page = by_id.get(to_id(page_id))
        if page is None:
            raise ValueError(f"there is no page {page_id!r}; use a page_id that search_pages returned")
        return json.dumps([{"section_id": key, "section_name": name} for key, (name, _) in page.sections.items()])

    def read_section(section_id: str) -> str:
        """Read a section.

        Args:
            section_id: a section_id of view_sections
        """
        text = texts.get(to_id(section_id))
        if text is None:
            raise ValueError(f"there is no section {section_id!r}; use a section_id that view_sections returned")
        return text

    return {"search_pages": search_pages, "view_sections": view_sections, "read_section": read_section}


def answer_reward_func(completion: list[dict[str, Any]], answer: str) -> float:
    """1 when the last "Answer:" line of the last reply is the right answer, whatever its case and punctuation."""
    last = completion[-1] if completion else {}
    found = FINAL.findall(str(last.get("content") or "")) if last.get("role") == "assistant" else []
    return float(bool(found) and normalize(found[-1]) == normalize(answer) != "")


def normalize(text: str) -> str:
    """Lower case, without accents, articles, punctuation and extra spaces."""
    plain = unicodedata.normalize("NFKD", text.lower())
    words = re.findall(r"\w+", "".join(c for c in plain if not unicodedata.combining(c)))
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def build_sft_examples(
    num_examples: int,
    num_pages: int = 200,
    seed: int = 0,
    tools: Sequence[str] = TOOLS,
    system_prompt: str | None = SYSTEM_PROMPT,
) -> list[dict[str, Any]]:
    """Conversations that find their answers with the tools, as rows (messages, tools) for supervised fine-tuning."""
    pages, questions = build_pages(num_pages, seed)
    env = load_environment(num_pages=num_pages, seed=seed, tools=tools, system_prompt=system_prompt)
    every_tool = build_tools(pages)
    rows = []
    for question, answer in [pair for pair in questions if _split_of(pair[0]) == "train"][:num_examples]:
        page = next(page for page in pages if page.title in re.findall(r"\w+", question))
        section = next(key for key, (_, text) in page.sections.items() if re.search(rf"\b{re.escape(answer)}\b", text))
        messages = _prompt(question, system_prompt)
        calls = {"search_pages": page.title, "view_sections": page.id, "read_section": section}
        for number, name in enumerate(tools):
            call = {"name": name, "arguments": json.dumps({_argument(name): calls[name]})}
            call_id = f"call_{number}"
            messages += [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": call_id, "type": "function", "function": call}],
                },
                {"role": "tool", "content": every_tool[name](calls[name]), "tool_call_id": call_id},
            ]
        messages.append({"role": "assistant", "content": f"Answer: {answer}"})
        rows.append({"messages": messages, "tools": env.oai_tools})
    return rows


def _argument(tool: str) -> str:
    return {"search_pages": "query", "view_sections": "page_id", "read_section": "section_id"}[tool]


def _build_judge(model: str, base_url: str | None, key_var: str) -> vf.Rubric:
    if not os.environ.get(key_var):
        raise ValueError(f"judge_model {model} needs a key: set the environment variable {key_var}")
    client = AsyncOpenAI(base_url=base_url, api_key=os.environ[key_var])
    rubric = vf.JudgeRubric(judge_client=client, judge_model=model, judge_prompt=JUDGE_PROMPT)

    async def judge_reward_func(
        judge: Any, prompt: vf.Messages, completion: vf.Messages, answer: str, state: vf.State
    ) -> float:
        """1 when the judge says yes; a judge that cannot be asked fails the rollout instead of giving it a 0."""
        try:
            said = await judge(prompt, completion, answer, state)
        except Exception as error:
            state["error"] = vf.InfraError(f"the judge {model} could not be asked: {error}")
            return 0.0
        return float(said.strip().lower().startswith("yes"))

    rubric.add_reward_func(judge_reward_func)
    return rubric


def _split_of(text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return "eval" if int.from_bytes(digest, "little") % EVAL_SHARE == 0 else "train"


def _read_questions(name: str, split: str) -> list[tuple[str, str]]:
    path = Path(name).expanduser()
    rows = load_dataset("json", data_files=str(path), split="train") if path.is_file() else None
    rows = load_dataset(name, split=split) if rows is None else rows
    if missing := {"question", "answer"} - set(rows.column_names):
        raise ValueError(f"dataset_name {name}: it has no column {', '.join(sorted(missing))}")
    return [(str(row["question"]), str(row["answer"])) for row in rows]


def _prompt(question: str, system_prompt: str | None) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": question}]


def _to_dataset(questions: list[tuple[str, str]], system_prompt: str | None) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [_prompt(question, system_prompt) for question, _ in questions],
            "answer": [answer for _, answer in questions],
            "example_id": list(range(len(questions))),
            "task": ["wiki-search"] * len(questions),
        }
    )
