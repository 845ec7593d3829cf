"""What a run does about groups that fail."""

from dataclasses import dataclass

from thinwire.base.checks import check_whole, is_number
from thinwire.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Go on without groups that die or cannot be reached; each group is started by a launcher of its own."""

    min_groups: int = 1
    """With fewer groups the run stops."""

    timeout: float = 60.0
    """Seconds after which a group that is alive but does not come is given up, and a store that does not answer."""

    heartbeat_timeout: float = 3.0
    """Seconds without a heartbeat after which a worker that others wait for counts as dead; at most `timeout`."""

    skip_after: float | None = None
    """Seconds that others may wait for a slow group, where groups train apart; it then leaves out its steps up to the
    average. None lets them wait."""

    on_term: str = "stop"
    """What SIGTERM to a group does: "stop" all groups after the same step, or let this group "leave" while at least
    `min_groups` others stay."""

    notices: str | None = None
    """"aws", "gcp" or "azure": ask this cloud every few seconds whether it takes the machine away, which then counts as
    SIGTERM. None asks nobody."""

    joins: bool = True
    """Whether groups may join a run that is under way. False is for loops that count their own batches, where a group
    that comes would begin at the first one; a group that was given up then stops."""

    def __post_init__(self) -> None:
        check_whole(self, "min_groups", 1)
        if not (is_number(self.timeout) and self.timeout >= 1):
            raise ConfigError(f"`timeout`={self.timeout!r} must be a number of seconds from 1 on, such as 60")
        if not (is_number(self.heartbeat_timeout) and self.heartbeat_timeout >= 1):
            raise ConfigError(
                f"`heartbeat_timeout`={self.heartbeat_timeout!r} must be a number of seconds from 1 on, such as 3"
            )
        if self.skip_after is not None and not (is_number(self.skip_after) and 0 <= self.skip_after < self.timeout):
            raise ConfigError(
                f"`skip_after`={self.skip_after!r} must be None or a number of seconds from 0 to below "
                f"`timeout`={self.timeout:g}, after which a group is given up"
            )
        if self.on_term not in ("stop", "leave"):
            raise ConfigError(f"`on_term`={self.on_term!r} must be 'stop' or 'leave'")
        if self.notices not in (None, "aws", "gcp", "azure"):
            raise ConfigError(f"`notices`={self.notices!r} must be None, 'aws', 'gcp' or 'azure'")
        if not isinstance(self.joins, bool):
            raise ConfigError(f"`joins`={self.joins!r} must be True or False")
        if not self.joins and self.skip_after is not None:
            raise ConfigError(
                f"`skip_after`={self.skip_after!r} with `joins`=False: a loop that counts its own batches does not "
                "notice steps that are left out; leave `skip_after` out, or loop over `replica.steps()`"
            )

    @property
    def start(self) -> float:
        """Seconds in which all groups must have come at first; their machines may start minutes apart."""
        return 10 * self.timeout

    @property
    def silence(self) -> float:
        """Seconds without a heartbeat after which a worker counts as dead."""
        return min(self.heartbeat_timeout, self.timeout)

    @property
    def opening(self) -> float:
        """Seconds after which a worker that is alive and does not connect is given up by the others."""
        return max(2.0, self.timeout / 3)
