"""Decides which images' features are kept, and which images are encoded next.

The model runner has the features; this cache knows which. An image is held from the step that
encodes or finds it to the step that uses the last of its features. Afterwards it stays until others
need its room; the least recently used is dropped first. A request holds only images that its next
tokens need, so it can always continue, and nobody waits for ever.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

from diptych_engine.scheduling.images import ImageWork, PlacedImage
from diptych_engine.scheduling.request import Request


@dataclass(slots=True)
class EncoderCache:
    """Room for the features of images, counted in tokens."""

    capacity: int = 0
    per_step: int = 0
    """A step that encodes this many tokens begins no further image."""
    encoded: int = 0
    """The number of encoded images."""
    hits: int = 0
    """How often a needed image was found."""
    work: ImageWork | None = None
    """The work on images in the step that is being planned."""
    passed: list[tuple[str, str]] = field(default_factory=list)
    """(request, key) of images that are held until the last planned step is launched."""
    _sizes: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Tokens of each image, the one used longest ago first."""
    _holders: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Key -> the requests that hold it."""
    _ordered: int = 0
    """Tokens of images that the step being planned encodes."""

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def num_tokens(self) -> int:
        return sum(self._sizes.values())

    def fit(self, request: Request, start: int, count: int) -> int:
        """Return how many of a request's tokens from `start` on, at most `count`, may be in the
        planned step: those before the first image without room."""
        end = start + count
        for image in request.images:
            if image.end <= start:
                continue
            if image.first >= end:
                break
            if not self._hold(request.request_id, image):
                return max(0, image.first - start)
            if image.end <= end:
                self.passed.append((request.request_id, image.key))
        return count

    def take_work(self) -> ImageWork | None:
        """Return the work on images in the planned step; None if there is none."""
        work, self.work, self._ordered = self.work, None, 0
        return work

    def let_go(self) -> None:
        """Release images whose last features the launched step used."""
        for request_id, key in self.passed:
            self._release(request_id, key)
        self.passed.clear()

    def release(self, request: Request) -> None:
        """Release all images of a request, which needs none, or none before it begins again."""
        for image in request.images:
            self._release(request.request_id, image.key)

    def forget_all(self) -> int:
        """Forget all features. Returns the number of images that had some."""
        count = len(self._sizes)
        self._sizes.clear()
        self._holders.clear()
        self.passed.clear()
        self.work, self._ordered = None, 0
        return count

    def _hold(self, request_id: str, image: PlacedImage) -> bool:
        """Keep an image's features for a request. False: there is no room to encode it now."""
        work = self.work or ImageWork()
        if image.key in self._sizes:
            self._sizes.move_to_end(image.key)
            self.hits += request_id not in self._holders[image.key]
        else:
            size = image.num_features
            late = self._ordered and self._ordered + size > self.per_step
            if late or not self._make_room(size, work):
                return False
            self._sizes[image.key] = size
            self._ordered += size
            self.encoded += 1
            work.encode.append(image)
        self._holders[image.key].add(request_id)
        self.work = work
        return True

    def _make_room(self, size: int, work: ImageWork) -> bool:
        """Forget images that nobody holds, as many as that takes; none if all are not enough."""
        free = self.capacity - self.num_tokens
        idle = [key for key in self._sizes if not self._holders.get(key)]
        if free + sum(self._sizes[key] for key in idle) < size:
            return False
        for key in idle:
            if free >= size:
                break
            free += self._sizes.pop(key)
            self._holders.pop(key, None)
            work.forget.append(key)
        return True

    def _release(self, request_id: str, key: str) -> None:
        if key in self._holders:
            self._holders[key].discard(request_id)
