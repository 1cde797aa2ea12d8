"""Where the operator is and how he came there: a path from the overview, with a way back and a way to the last view."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Spot:
    """One view: a panel's page (empty: the overview), the pod that it is about, the filter and the focus there."""

    page: str = ""
    pod: str = ""
    filter: str = ""
    focus: str = ""


class Trail:
    """The path to where we are. A spot that is on it already is gone back to, so that a path has no circles."""

    def __init__(self) -> None:
        self._path = [Spot()]
        self._last: Spot | None = None

    @property
    def here(self) -> Spot:
        """The view that is shown."""
        return self._path[-1]

    @property
    def moved(self) -> bool:
        """Whether there is a last view."""
        return self._last is not None

    @property
    def path(self) -> tuple[Spot, ...]:
        """From the overview to here."""
        return tuple(self._path)

    def leave(self, *, filter: str, focus: str) -> None:
        """Remember how this spot looks before it is left."""
        self._path[-1] = replace(self._path[-1], filter=filter, focus=focus)

    def go(self, spot: Spot) -> Spot:
        """To another view; the overview ends the path. Returns the spot as it was left, if it was on the path."""
        self._last = self.here
        same = next((i for i, s in enumerate(self._path) if (s.page, s.pod) == (spot.page, spot.pod)), None)
        if same is not None:
            del self._path[same + 1 :]
        else:
            self._path.append(spot)
        return self.here

    def turn(self, pod: str) -> None:
        """The same view of another pod, in the place of this one."""
        self._path[-1] = replace(self._path[-1], pod=pod)

    def back(self) -> Spot | None:
        """One step towards the overview; None at its end."""
        if len(self._path) == 1:
            return None
        self._last = self._path.pop()
        return self.here

    def last(self) -> Spot | None:
        """To the view before this one, wherever that was; again comes back. None where there was none."""
        return self.go(self._last) if self._last is not None and self._last != self.here else None
