"""Which classes the nodes of a section name, in all option files, and what such nodes may hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from distdl.config.schema import COLLECTIONS, COMPONENTS
from distdl.tools.editor.arguments import PART, Arguments, Known
from distdl.tools.editor.options import OptionFile, Options, targets_in
from distdl.tools.editor.shapes import NodeShape, of_class, of_node, union


@dataclass(frozen=True)
class NamedClasses:
    """The classes that options name, and that there are besides.

    Args:
        options: All groups.
        known: What classes take.
    """

    options: Options
    known: Known

    def arguments(self, target: str) -> Arguments:
        return self.known.arguments.get(target, Arguments())

    def targets(self, section: str) -> list[str]:
        """The targets of a section whose arguments are known: what options and experiments name,
        and what there is besides."""
        if section == PART:
            all_named = {t for option in self.options.all() for t in targets_in(option.content)}
            own = {target for each in (*COMPONENTS, *COLLECTIONS) for target in self.targets(each)}
            return sorted(all_named - own)
        named = {str(node["_target_"]) for node in self._nodes(section) if "_target_" in node}
        return sorted({*named, *self.known.homes.get(section, ())})

    def contents(self, section: str) -> Iterator[tuple[OptionFile, dict[str, Any], str]]:
        """What each file says of a section, and the path of that in the file."""
        for option, merged in self._merged:
            if option.package == section:
                yield option, merged, ""
            elif option.package == "_global_" and isinstance(merged.get(section), dict):
                yield option, merged[section], section

    def _nodes(self, section: str) -> Iterator[dict[str, Any]]:
        """The nodes of a section in all files, as far as the option and those of its group say."""
        for _, content, _ in self.contents(section):
            inner = content.values() if section in COLLECTIONS else [content]
            yield from (node for node in inner if isinstance(node, dict))

    @cached_property
    def _merged(self) -> list[tuple[OptionFile, dict[str, Any]]]:
        return [(option, self.options.merged(option)) for option in self.options.all()]

    def shape(
        self, option: OptionFile, content: Mapping[str, Any], section: str, path: str
    ) -> NodeShape:
        about = self.options.comments(option)
        return of_node(content, section, self.known.arguments, about, path)

    def shape_of_target(self, section: str, target: str) -> NodeShape:
        """What a node of a class may hold, also in nodes of other classes inside it."""
        shapes = [
            self.shape(option, content, section, path)
            for option, content, path in self.contents(section)
            if content.get("_target_") == target
        ]
        return union(shapes) if shapes else of_class(self.arguments(target), section)

    def chosen_or_not(
        self, option: OptionFile, content: Mapping[str, Any], section: str, path: str
    ) -> NodeShape:
        """What an option adds to the keys of a section of which the choice is not known. The
        package of an option of distdl's may be missing here: it must not open the section."""
        shape = self.shape(option, content, section, path)
        unread = self.arguments(str(content["_target_"])).unread
        return replace(shape, more=False) if unread and not option.own else shape
