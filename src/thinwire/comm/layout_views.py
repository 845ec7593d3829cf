"""Layouts seen from several workers at once, for plans: one worker stands for all that do the same.

What a collective sends differs from node to node even where workers do the same (the root of a tree sends more than
its leaves), and with the number of nodes. So everything is counted for each of the views.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from thinwire.comm.sent import Ranks, Sent
from thinwire.comm.topology import Topology


@dataclass(frozen=True)
class SentByView(Sent):
    """What a collective sends from each of several nodes; its own fields are those of the first."""

    views: tuple[Sent, ...] = ()

    def __add__(self, other: Sent) -> Sent:
        return by_view([mine + its for mine, its in zip(self.views, self._of(other), strict=True)])

    def in_parallel(self, other: Sent) -> Sent:
        return by_view([mine.in_parallel(its) for mine, its in zip(self.views, self._of(other), strict=True)])

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.views)

    def _of(self, other: Sent) -> tuple[Sent, ...]:
        return other.views if isinstance(other, SentByView) else (other,) * len(self.views)


class SizeByView(int):
    """Bytes that differ from view to view; the number itself is that of the first."""

    views: tuple[int, ...]

    @classmethod
    def of(cls, views: Sequence[int]) -> "SizeByView":
        found = cls(views[0])
        found.views = tuple(views)
        return found


def by_view(views: Sequence[Sent]) -> SentByView:
    """One value for all views."""
    return SentByView(**vars(views[0]), views=tuple(views))


def _from_each_view(count: Callable[..., Sent]) -> Callable[..., Sent]:
    """The same arithmetic for every view, with that view's members."""

    def counted(self: "LayoutViews", members: Ranks, size: int, *more: Any) -> Sent:
        def seen(view: Topology, size: int) -> Sent:
            return count(view, self._members_of(view, members), size, *more)

        return self._seen((count.__name__, members, *more), size, seen)

    return counted


@dataclass(frozen=True)
class LayoutViews(Topology):
    """The layout of a worker that stands for all in `views`, of this layout or of others; the first is its own."""

    views: tuple[Topology, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, views: Sequence[Topology]) -> "LayoutViews":
        """From the views of workers that are alike."""
        own = {name: value for name, value in vars(views[0]).items() if name in Topology.__dataclass_fields__}
        return cls(**own, views=tuple(views))

    def carried_by(self, member: int) -> "Topology":
        """The same layout, from each view, with one member of each group that carries everything."""
        if member not in self._carried:
            views = tuple(view.carried_by(member) for view in self.views)
            self._carried[member] = replace(self, groups=views[0].groups, carriers=1, views=views)
        return self._carried[member]

    def at_once(self, parts: Sequence[tuple[Ranks, int]]) -> Sent:
        return self._seen(
            ("at_once", tuple(parts)),
            0,
            lambda view, _: view.at_once([(self._members_of(view, members), size) for members, size in parts]),
        )

    def by_groups(self, count: Callable[[int], int]) -> int:
        return SizeByView.of([view.by_groups(count) for view in self.views])

    ring = _from_each_view(Topology.ring)
    gather_ring = _from_each_view(Topology.gather_ring)
    star = _from_each_view(Topology.star)
    mesh = _from_each_view(Topology.mesh)
    double_tree = _from_each_view(Topology.double_tree)

    def tree(self, members: Ranks, size: int, root: int) -> Sent:
        """A broadcast from a root, which has the same index among the members of each view."""
        place = members.index(root)

        def seen(view: Topology, size: int) -> Sent:
            its = self._members_of(view, members)
            return view.tree(its, size, its[place])

        return self._seen(("tree", members, root), size, seen)

    def _seen(self, what: tuple[Any, ...], size: int, look: Callable[[Topology, int], Sent]) -> SentByView:
        """Counted once: a run repeats a few collectives a thousand times."""
        sizes = size.views if isinstance(size, SizeByView) else (size,) * len(self.views)
        if (what, sizes) not in self._known:
            self._known[what, sizes] = by_view([look(*pair) for pair in zip(self.views, sizes, strict=True)])
        return self._known[what, sizes]

    def _members_of(self, view: Topology, members: Ranks) -> Ranks:
        """Members for another view: its group, its world, or its ranks that carry the same share."""
        if members == self.group:
            return view.group
        if members == self.world:
            return view.world
        share = next((j for j in range(self.shares) if self.crossing(j) == members), None)
        if share is not None:
            return view.crossing(share)
        assert (view.rank, view.groups) == (self.rank, self.groups), "these members are known to the worker itself only"
        return members

    @cached_property
    def _known(self) -> dict[tuple[Any, ...], SentByView]:
        return {}


def kind(view: Topology) -> Hashable:
    """What workers must have in common for one to stand for the others, whatever the method."""
    alone = all(len(group) == 1 for group in view.groups)
    return len(view.group), view.member, len(view.groups) > 1, view.shares, alone, view.algorithm
