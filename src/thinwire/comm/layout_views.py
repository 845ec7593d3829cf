"""Layouts seen from several workers at once, for plans: one worker acts for all that do the same.

What a collective sends differs from node to node even where workers do the same: the root of a tree sends more than
its leaves. And it differs with the number of nodes. So everything is counted for each of the views.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from thinwire.comm.sent import Ranks, Sent
from thinwire.comm.topology import Topology


@dataclass(frozen=True)
class SentByView(Sent):
    """What a collective sends from each of several nodes; its own fields are the first one's."""

    views: tuple[Sent, ...] = ()

    def __add__(self, other: Sent) -> Sent:
        """One collective after the other."""
        return by_view([mine + its for mine, its in zip(self.views, self._of(other), strict=True)])

    def beside(self, other: Sent) -> Sent:
        """Both at once."""
        return by_view([mine.beside(its) for mine, its in zip(self.views, self._of(other), strict=True)])

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.views)

    def _of(self, other: Sent) -> tuple[Sent, ...]:
        return other.views if isinstance(other, SentByView) else (other,) * len(self.views)


def by_view(views: Sequence[Sent]) -> SentByView:
    """What these views say, as one."""
    return SentByView(**vars(views[0]), views=tuple(views))


@dataclass(frozen=True)
class LayoutViews(Topology):
    """The layout of a worker that acts for all in `views`, of this layout or of others; the first of them is itself."""

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
        """Several all-reduces side by side."""
        return self._seen(
            ("at_once", tuple(parts)),
            lambda view: view.at_once([(self._members_of(view, members), size) for members, size in parts]),
        )

    def ring(self, members: Ranks, size: int) -> Sent:
        """An all-reduce by a ring."""
        return self._seen(("ring", members, size), lambda view: view.ring(self._members_of(view, members), size))

    def gather_ring(self, members: Ranks, size: int) -> Sent:
        """An all-gather."""
        return self._seen(
            ("gather_ring", members, size), lambda view: view.gather_ring(self._members_of(view, members), size)
        )

    def star(self, members: Ranks, size: int) -> Sent:
        """Everyone and the first member."""
        return self._seen(("star", members, size), lambda view: view.star(self._members_of(view, members), size))

    def mesh(self, members: Ranks, size: int) -> Sent:
        """Everyone and everyone else."""
        return self._seen(("mesh", members, size), lambda view: view.mesh(self._members_of(view, members), size))

    def double_tree(self, members: Ranks, size: int) -> Sent:
        """An all-reduce by two trees."""
        return self._seen(
            ("double_tree", members, size), lambda view: view.double_tree(self._members_of(view, members), size)
        )

    def tree(self, members: Ranks, size: int, root: int) -> Sent:
        """A broadcast from a root, which stands at the same place among the members of each view."""
        place = members.index(root)

        def seen(view: Topology) -> Sent:
            its = self._members_of(view, members)
            return view.tree(its, size, its[place])

        return self._seen(("tree", members, size, root), seen)

    def _seen(self, what: tuple[Any, ...], look: Callable[[Topology], Sent]) -> SentByView:
        """Counted once: a run repeats a few collectives a thousand times."""
        if what not in self._known:
            self._known[what] = by_view([look(view) for view in self.views])
        return self._known[what]

    def _members_of(self, view: Topology, members: Ranks) -> Ranks:
        """Who takes part for another view: its group, its world, or those of it that carry the same share."""
        if members == self.group:
            return view.group
        if members == self.world:
            return view.world
        share = next((j for j in range(self.shares) if self.crossing(j) == members), None)
        if share is not None:
            return view.crossing(share)
        assert (view.rank, view.groups) == (self.rank, self.groups), "only a worker itself can say what these are"
        return members

    @cached_property
    def _known(self) -> dict[tuple[Any, ...], SentByView]:
        return {}


def kind(view: Topology) -> Hashable:
    """What workers must have in common for one to act for the others, whatever the method."""
    alone = all(len(group) == 1 for group in view.groups)
    return len(view.group), view.member, len(view.groups) > 1, view.shares, alone, view.algorithm
