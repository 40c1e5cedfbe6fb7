"""YAML text to plain data that remembers its lines.

Only what YAML shares with JSON is taken: one document, mappings with string keys, lists, scalars. Two things that the
usual loader lets pass are refused, because each silently drops what somebody wrote: a key given twice (the last would
win), and merge keys ``<<``. Anchors work, but a document that expands to more than ``MAX_NODES`` values is refused: a
few lines of nested aliases would otherwise expand to gigabytes. The parser written in C is used where it is there:
10,000 adapters are read in 0.4 s, against 1.8 s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from loraledger.config.origin import Origin, Problem, Tree, Where, dotted
from loraledger.errors import ConfigError

MAX_NODES: Final = 1_000_000
"""A catalog of 100,000 adapters with five fields each just about fits."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str, name: str) -> tuple[Tree, list[Problem]]:
    """The sections in ``text`` with their lines, and what was refused in it; ``name`` is how messages call the file.

    Raises :class:`ConfigError` when ``text`` is not one YAML document with a mapping at its top.
    """
    walk = _Walk(name)
    data = walk.document(text)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: must be a mapping of sections (base:, replicas:, tenants:, ...) at its top")
    walk.tree.data = data
    return walk.tree, walk.problems


def read_value(text: str) -> object:
    """One value in YAML's notation (``8``, ``[a, b]``, ``{x: 1}``), as environment and flags give it.

    Raises :class:`ConfigError` when ``text`` is none.
    """
    walk = _Walk("value")
    value = walk.document(text)
    if walk.problems:
        raise ConfigError(walk.problems[0].message)
    return value


@dataclass(slots=True)
class _Walk:
    """One pass over the nodes of a document."""

    name: str
    tree: Tree = field(default_factory=Tree)
    problems: list[Problem] = field(default_factory=list)
    nodes: int = 0
    open_nodes: set[int] = field(default_factory=set)
    loader: Any = None

    def document(self, text: str) -> object:
        try:
            self.loader = _Loader(text)
            node = self.loader.get_single_node()
            return None if node is None else self.value((), node)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError(f"{self.name}:{line}: is not valid YAML: {error.problem or error.context}") from error
        except (yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"{self.name}: is not valid YAML: {_first_line(error)}") from error

    def value(self, where: Where, node: yaml.Node) -> object:
        self.nodes += 1
        line = node.start_mark.line + 1
        if self.nodes > MAX_NODES or id(node) in self.open_nodes:
            what = "refers to itself" if id(node) in self.open_nodes else f"expands to more than {MAX_NODES:,} values"
            raise ConfigError(f"{self.name}:{line}: {dotted(where)}: {what}: write it without aliases")
        # The key's line, noted before, says it better than the first line of a section's body.
        self.tree.origins.setdefault(where, self.at(line))
        self.open_nodes.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(where, node)
            if isinstance(node, yaml.SequenceNode):
                return [self.value((*where, index), item) for index, item in enumerate(node.value)]
            return self.scalar(where, node)
        finally:
            self.open_nodes.discard(id(node))

    def mapping(self, where: Where, node: yaml.MappingNode) -> dict[str, object]:
        result: dict[str, object] = {}
        for key_node, value_node in node.value:
            at = self.at(key_node.start_mark.line + 1)
            key = key_node.value
            if key_node.tag == "tag:yaml.org,2002:merge":
                self.problems.append(Problem(where, "merge keys (<<) are not supported: repeat the fields", at))
            elif not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                self.problems.append(Problem(where, "has a key that is not plain text: put it in quotes", at))
            elif key in result:
                first = self.tree.origins[*where, key]
                self.problems.append(Problem((*where, key), f"is given twice, first at {first}: keep one", at))
            else:
                self.tree.origins[*where, key] = at
                result[key] = self.value((*where, key), value_node)
        return result

    def scalar(self, where: Where, node: yaml.Node) -> object:
        try:
            return self.loader.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            message = f"cannot be read: {_first_line(error)}: put it in quotes"
            self.problems.append(Problem(where, message, self.at(node.start_mark.line + 1)))
            return None

    def at(self, line: int) -> Origin:
        return Origin("file", self.name, line)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
