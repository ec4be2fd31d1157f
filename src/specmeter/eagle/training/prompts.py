"""Where the training prompts come from: the model's own user turns, and instructions put to real text of this machine.

A chat prompt is the chat template's text up to the assistant's turn. User turns are *free* (the model samples them from
nothing), *opened* (it continues an opener), *written* (a form filled with topics or numbers) or *grounded* (an
instruction about a passage of documentation or code installed beside Python). None comes from ``eval_prompts.json``.
"""

from __future__ import annotations

import ast
import json
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
USER = "<|im_start|>user\n"
ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n"

PARTS: dict[str, list[str]] = json.loads(Path(__file__).with_name("prompt_parts.json").read_text(encoding="utf-8"))
"""Openers of user turns; forms with ``{}`` for topics, numbers, prose and code; topics and languages to fill in."""


def openers() -> list[str]:
    """Beginnings of user turns that the model continues."""
    return PARTS["openers"]


def written_turns(random: np.random.Generator, count: int) -> list[str]:
    """Complete user turns about topics and arithmetic, ``count`` of them, filled in at random."""
    topics, topic_forms, math_forms = PARTS["topics"], PARTS["topic_forms"], PARTS["math_forms"]
    languages = PARTS["languages"]
    turns = []
    for _ in range(count):
        if random.random() < 0.75:
            form = topic_forms[int(random.integers(len(topic_forms)))]
            picks = [topics[int(random.integers(len(topics)))] for _ in range(form.count("{}"))]
            turns.append(form.format(*picks, lang=languages[int(random.integers(len(languages)))]))
        else:
            form = math_forms[int(random.integers(len(math_forms)))]
            top = int(10 ** random.uniform(1, 3.5))
            turns.append(form.format(*(int(random.integers(2, top + 2)) for _ in range(form.count("{}")))))
    return turns


def grounded_turns(random: np.random.Generator, count: int, longest_chars: int) -> list[str]:
    """User turns that put an instruction to a passage of real prose or code of up to ``longest_chars`` characters."""
    prose, code = local_texts()
    text_forms, code_forms = PARTS["text_forms"], PARTS["code_forms"]
    turns = []
    for _ in range(count):
        pool, forms = (prose, text_forms) if random.random() < 0.65 or not code else (code, code_forms)
        if not pool:
            break
        text = pool[int(random.integers(len(pool)))]
        size = int(np.exp(random.uniform(np.log(150), np.log(longest_chars))))
        start = int(random.integers(max(1, len(text) - size)))
        start = text.rfind("\n\n", 0, start) + 2 if text.rfind("\n\n", 0, start) >= 0 else 0
        passage = text[start : start + size].strip()
        form = forms[int(random.integers(len(forms)))]
        turns.append(form.replace("{}", passage))
    return turns


@lru_cache(maxsize=1)
def local_texts(most_files: int = 600) -> tuple[list[str], list[str]]:
    """Prose and code found beside this Python: package descriptions and docstrings, and source of functions."""
    prose: list[str] = []
    code: list[str] = []
    site = Path(sysconfig.get_paths()["purelib"])
    for path in sorted(site.glob("*.dist-info/METADATA")):
        _, _, body = path.read_text(encoding="utf-8", errors="ignore").partition("\n\n")
        prose.append(body)
    for path in _sources(most_files):
        for kind, text in _pieces(path.read_text(encoding="utf-8", errors="ignore")):
            (prose if kind == "prose" else code).append(text)
    return [text for text in prose if _plain(text)], [text for text in code if _plain(text)]


def _sources(most: int) -> list[Path]:
    paths = sysconfig.get_paths()
    found: list[Path] = []
    for root in (Path(paths["stdlib"]), Path(paths["purelib"])):
        inside = sorted(p for pattern in ("*.py", "*/*.py", "*/*/*.py") for p in root.glob(pattern))
        inside = [p for p in inside if "test" not in str(p) and p.stat().st_size < 60_000]
        found += inside[:: max(1, 2 * len(inside) // most)]
    return found


def _pieces(source: str) -> Iterator[tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node) or ""
            if len(text) > 300:
                yield "prose", text
        if isinstance(node, ast.FunctionDef):
            # ast.get_source_segment splits the whole file anew for each function: minutes over many files.
            piece = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if 150 < len(piece) < 2500:
                yield "code", piece


def _plain(text: str) -> bool:
    return len(text) > 150 and "<|" not in text and sum(ord(c) < 128 for c in text) > 0.95 * len(text)
