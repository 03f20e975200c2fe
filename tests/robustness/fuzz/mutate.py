"""Damage, drawn from a seeded generator: the same number always makes the same file."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

from dllp.runs import tensors

NUMBERS = (0, 1, -1, 2, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**62, 2**63, 10**24, 10**300, 0.5, -0.0, 1e308, "", "text", "x" * 5000,
    "../../../etc/passwd", "/dev/zero", "\x1b[31m", "line\nline", "\ud800", "nan", "[bold]name[/bold]", "os:system",
    [], {}, [[]], [None], {"": None}, [0, 0], [-1], [1.5], [2**62, 2**62], {"a": {"b": {"c": []}}}, list(range(100)),
)  # fmt: skip
TOKENS = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"null", b"true", b"[" * 3000, b'{"a":' * 1500,
    b"\xff\xfe", b"\xed\xa0\x80", b"\x00" * 16, b"\xc0\xaf", b"!!python/object/apply:os.system ['true']", b"*a",
    b"&a [*a, *a]", b"<<: {}", b"0x" + b"f" * 4000, b"1:1:1:1:1:1", b"2026-11-15", b".nan", b".inf", b"- - - - - -",
    b"? ? ? ?", b"{{{{", b"!!binary aGk=", b"'\\x1b'", b"\r\n", b"\xe2\x80\xa8", b"cos\nsystem\n", b"(lp0\n",
    b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f", b"r\xff\xff\xff\xff", b"T\xff\xff\xff\x7f", b"PK\x03\x04", b"#index",
    b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\x89PNG\r\n\x1a\n",
)  # fmt: skip


def mutate(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """One to four kinds of damage; `other` is a file to borrow from."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        content = rng.choice(_OPERATIONS)(rng, content, other)
    return content


def _cut(rng: random.Random, size: int) -> tuple[int, int]:
    start = rng.randrange(size + 1)
    return start, min(size, start + rng.choice((1, 2, 4, 8, 64, 1024, size)))


def _flip(rng: random.Random, content: bytes, other: bytes) -> bytes:
    changed = bytearray(content)
    # The first bytes are headers: half of the damage goes there.
    reach = len(changed) if rng.random() < 0.5 else min(len(changed), 256)
    for _ in range(rng.choice((1, 1, 2, 8)) if changed else 0):
        changed[rng.randrange(reach)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _number(rng: random.Random, content: bytes, other: bytes) -> bytes:
    form = rng.choice(("<B", "<H", "<I", "<Q", ">H", ">I"))
    value = struct.pack(form, rng.choice(NUMBERS) % 2 ** (8 * struct.calcsize(form)))
    reach = len(content) if rng.random() < 0.5 else min(len(content), 64)
    start = rng.randrange(reach + 1)
    return content[:start] + value + content[start + len(value) :]


def _truncate(rng: random.Random, content: bytes, other: bytes) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _extend(rng: random.Random, content: bytes, other: bytes) -> bytes:
    return content + rng.choice((b"\x00", b"\n", other[:64], rng.randbytes(100), b" " * 100_000))


def _delete(rng: random.Random, content: bytes, other: bytes) -> bytes:
    start, end = _cut(rng, len(content))
    return content[:start] + content[end:]


def _repeat(rng: random.Random, content: bytes, other: bytes) -> bytes:
    start, end = _cut(rng, len(content))
    return content[:end] + content[start:end] * rng.choice((1, 2, 50)) + content[end:] if len(content) < 10**6 else b""


def _swap(rng: random.Random, content: bytes, other: bytes) -> bytes:
    a, b, c = sorted(rng.randrange(len(content) + 1) for _ in range(3))
    return content[:a] + content[b:c] + content[a:b] + content[c:]


def _splice(rng: random.Random, content: bytes, other: bytes) -> bytes:
    start, end = _cut(rng, len(other))
    place = rng.randrange(len(content) + 1)
    return content[:place] + other[start:end] + content[place + (end - start if rng.random() < 0.5 else 0) :]


def _token(rng: random.Random, content: bytes, other: bytes) -> bytes:
    token, place = rng.choice(TOKENS), rng.randrange(len(content) + 1)
    return content[:place] + token + content[place + (len(token) if rng.random() < 0.5 else 0) :]


_OPERATIONS: tuple[Callable[[random.Random, bytes, bytes], bytes], ...] = (
    _flip, _flip, _number, _number, _truncate, _extend, _delete, _repeat, _swap, _splice, _token,
)  # fmt: skip


# ---- damage that keeps the grammar, and so goes deeper


def mutate_json(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """The same document with a few values, names or parts replaced."""
    value = json.loads(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = _replace(rng, value)
    return json.dumps(value).encode()


def _replace(rng: random.Random, value: Any, depth: int = 0) -> Any:
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.15:
        if isinstance(value, (int, float)) and rng.random() < 0.4:
            return rng.choice((value + 1, value - 1, -value, value * 10, float(value), str(value)))
        return copy.deepcopy(rng.choice(VALUES))
    value = copy.copy(value)
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    action = rng.random()
    if action < 0.1:
        del value[key]
    elif action < 0.2 and isinstance(value, dict):
        value[rng.choice(("", "unknown", "../x", "0", str(key) + " "))] = value.pop(key)
    elif action < 0.2 and isinstance(value, list):
        value.append(value[key])
    else:
        value[key] = _replace(rng, value[key], depth + 1)
    return value


def mutate_tensors(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """A safetensors file whose header is another document, its length right or nearly so."""
    length = struct.unpack("<Q", content[:8])[0]
    header, body = content[8 : 8 + length], content[8 + length :]
    if rng.random() < 0.8:  # a stranger's file has no checksum: what lies behind it must hold, too
        plain = json.loads(header)
        plain.get("__metadata__", {}).pop(tensors.CHECKSUM, None)
        header = json.dumps(plain).encode()
    header = mutate_json(rng, header, b"")
    off = rng.choice((0, 0, 0, 0, 1, -1))
    return struct.pack("<Q", len(header) + off) + header + (body if rng.random() < 0.9 else mutate(rng, body, other))


def mutate_lines(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """A settings file with the values of some lines replaced."""
    lines = content.decode().splitlines()
    for _ in range(rng.choice((1, 1, 2, 3))):
        i = rng.randrange(len(lines))
        name = lines[i].partition(":")[0]
        text = rng.choice((json.dumps(rng.choice(VALUES)), repr(rng.choice(TOKENS))[2:-1], str(rng.choice(NUMBERS))))
        lines[i] = rng.choice((f"{name}: {text}", f"{name}: {text}", f"{text}: 1", text, f"  {lines[i]}"))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def mutate_array(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """An .npy file whose header has other numbers and types, its length right."""
    length = struct.unpack("<H", content[8:10])[0]
    header, body = content[10 : 10 + length].decode("latin-1"), content[10 + length :]
    old, new = rng.choice((
        ("'descr': '", "'descr': '" + rng.choice(("|O", ">", "S", "V", "(2,2)", "m8[s]", "c8", "x" * 50))),
        ("(", "(" + str(rng.choice(NUMBERS)) + ", "), ("(", "(" * rng.choice((2, 90, 400))), ("(", "(-"), (")", ",)"),
        ("False", rng.choice(("True", "None", "1", "__import__"))), ("shape", "shap"), ("}", ", 'more': 1}"),
        ("'fortran", rng.choice(("b'fortran", "'Fortran", "1, 'fortran"))),
    ))  # fmt: skip
    header = header.replace(old, new, 1)
    packed = header.encode("latin-1")
    return content[:8] + struct.pack("<H", len(packed) % 65536) + packed + body
