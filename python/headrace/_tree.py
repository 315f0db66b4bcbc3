# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint as a tree of attributes: "model.layers.0.mlp.up_proj.weight" is tree.model.layers[0].mlp.up_proj.weight.

Some things go by a general name too, found from the tree and not from a list of models: `blocks` is the longest list of equal parts,
`embed_tokens`, `norm` and `lm_head` are the tables and norms around it, and a part whose name ends in "_attn" is `attn`.
"""
from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator


class Node:
    """A part of a checkpoint. Its parts are attributes, or items where they are numbered."""

    def __init__(self, path: str, get: Callable[[str], Any]) -> None:
        self._path, self._get = path, get
        self._parts: dict[str, Node | str] = {}  # a str is the name of a tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self._parts.get(name)
        if found is None:
            found = _by_general_name(self, name)
        if found is None:
            raise AttributeError(f"{self._path or 'the checkpoint'} has no {name!r}: it has {', '.join(self._parts)}")
        return self._get(found) if isinstance(found, str) else found

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, int):
            return getattr(self, str(key if key >= 0 else len(self) + key)) if -len(self) <= key < len(self) else self._missing(key)
        node: Any = self
        for part in key.split("."):
            node = getattr(node, part)
        return node

    def _missing(self, key: int) -> Any:
        raise IndexError(f"{self._path or 'the checkpoint'} has {len(self)} parts; there is no {key}")

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self, name) for name in self._parts])

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._parts})

    def names(self) -> list[str]:
        """Of its parts."""
        return list(self._parts)

    def __repr__(self) -> str:
        return f"<{self._path or 'checkpoint'}: {', '.join(self._parts)}>"


def tree_of(names: Iterable[str], get: Callable[[str], Any]) -> Node:
    """The tree of some tensors' names; get() gives a tensor by its name."""
    root = Node("", get)
    for name in names:
        *path, last = name.split(".")
        node = root
        for part in path:
            child = node._parts.get(part)
            if not isinstance(child, Node):  # a tensor may have the name of a part: the part is reached, the tensor by item
                child = Node(f"{node._path}.{part}".lstrip("."), get)
                node._parts[part] = child
            node = child
        node._parts.setdefault(last, name)
    for node in _all(root):
        if node._parts and all(part.isdigit() for part in node._parts):
            node._parts = dict(sorted(node._parts.items(), key=lambda item: int(item[0])))
    return root


def _all(node: Node) -> Iterator[Node]:
    yield node
    for part in node._parts.values():
        if isinstance(part, Node):
            yield from _all(part)


def _size(node: Node) -> int:
    return sum(_size(part) if isinstance(part, Node) else 1 for part in node._parts.values())


def _by_general_name(node: Node, name: str) -> Node | str | None:
    if name == "blocks":
        return _blocks(node)
    if name in ("embed_tokens", "norm", "lm_head"):
        return _around_blocks(node, name)
    found = [part for key, part in node._parts.items() if key.endswith("_" + name)]
    return found[0] if len(found) == 1 else None


def _blocks(node: Node) -> Node | None:
    lists = [inner for inner in _all(node) if len(inner) > 1 and all(part.isdigit() for part in inner._parts)]
    return max(lists, key=_size, default=None)


def _around_blocks(node: Node, name: str) -> Node | None:
    blocks = _blocks(node)
    inside = set(map(id, _all(blocks))) if blocks else set()
    for inner in _all(node):
        if id(inner) in inside or "weight" not in inner._parts:
            continue
        last = inner._path.rpartition(".")[2].lower()
        if name == "embed_tokens" and (
            last in ("wte", "tok_embeddings") or "embed" in last and "position" not in last and "type" not in last
        ):
            return inner
        if name == "norm" and (last in ("ln_f",) or "norm" in last and "embed" not in inner._path.lower()):
            return inner
        if name == "lm_head" and (last in ("lm_head", "output", "embed_out") and inner._path.count(".") <= 1):
            return inner
    return None
