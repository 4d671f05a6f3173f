"""English and code from Python's own standard library (PSF licence), found on the running machine.

The text follows the Python version, so this part of the corpus repeats bit for bit only under one
version; the synthetic part repeats everywhere.
"""

import ast
import functools
import inspect
import pathlib
import sysconfig

from deepinfer_jax.training.corpus.chat import BOS
from deepinfer_jax.training.corpus.example import EOS

MODULES = (
    "abc", "argparse", "ast", "asyncio", "bisect", "calendar", "cmd", "codecs", "collections",
    "concurrent", "configparser", "contextlib", "copy", "csv", "ctypes", "curses", "dataclasses",
    "datetime", "decimal", "difflib", "dis", "doctest", "email", "enum", "filecmp", "fileinput",
    "fnmatch", "fractions", "ftplib", "functools", "getpass", "gettext", "glob", "graphlib",
    "gzip", "hashlib", "heapq", "hmac", "html", "http", "importlib", "inspect", "ipaddress",
    "json", "keyword", "linecache", "locale", "logging", "mailbox", "mimetypes",
    "multiprocessing", "netrc", "numbers", "operator", "optparse", "os", "pathlib", "pdb",
    "pickle", "pickletools", "platform", "plistlib", "posixpath", "pprint", "profile", "pstats",
    "queue", "random", "reprlib", "sched", "secrets", "selectors", "shelve", "shlex", "shutil",
    "signal", "smtplib", "socket", "socketserver", "sqlite3", "stat", "statistics", "string",
    "stringprep", "subprocess", "symtable", "tarfile", "tempfile", "textwrap", "threading",
    "timeit", "tokenize", "trace", "traceback", "turtle", "types", "typing", "unittest", "urllib",
    "uuid", "wave", "weakref", "wsgiref", "xml", "zipapp", "zipfile",
)  # fmt: skip
_LONGEST, _SHORTEST = 1100, 80  # characters of one document; 1100 stay below 480 tokens
_FORBIDDEN = ("<｜", "｜>", "｜DSML｜", "<think>", "</think>")


@functools.cache
def documents() -> tuple[str, ...]:
    """The documents, rendered with their begin and end tokens, in a fixed order.

    Raises FileNotFoundError where Python was installed without its library's source.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    found: dict[str, None] = {}
    for name in MODULES:
        for path in (root / f"{name}.py", *sorted((root / name).rglob("*.py"))):
            if path.is_file() and "test" not in path.parts:
                found.update(dict.fromkeys(_texts(path.read_text("utf-8"))))
    if not found:
        raise FileNotFoundError(
            f"no standard library source in {root}; install it or ask for library_share=0"
        )
    return tuple(BOS + text + EOS for text in found)


def _texts(source: str) -> list[str]:
    """Docstrings and short functions of one module, cut to documents."""
    texts: list[str] = []
    tree = ast.parse(source)
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            texts += _paragraphs(inspect.cleandoc(ast.get_docstring(node) or ""))
        if isinstance(node, ast.FunctionDef):
            body = lines[node.lineno - 1 : node.end_lineno]
            texts.append(inspect.cleandoc("\n" + "\n".join(body)))
    return [text for text in texts if _usable(text)]


def _paragraphs(text: str) -> list[str]:
    """Whole paragraphs, joined while they stay below the longest document."""
    joined: list[str] = []
    for paragraph in text.split("\n\n"):
        if joined and len(joined[-1]) + len(paragraph) + 2 <= _LONGEST:
            joined[-1] += "\n\n" + paragraph
        else:
            joined.append(paragraph)
    return joined


def _usable(text: str) -> bool:
    return (
        _SHORTEST <= len(text) <= _LONGEST
        and text.isascii()
        and not any(mark in text for mark in _FORBIDDEN)
    )
