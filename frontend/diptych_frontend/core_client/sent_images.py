"""Sends the names of images that a core already has, in place of their tiles.

A core may forget an image, for lack of room or because of a reset. It then reports that the image
is missing, and the request is sent again with all of them. The caller does not notice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import msgspec

from diptych_protocol import EngineCoreOutputs, EngineCoreRequest, MultiModalFeatureSpec
from diptych_protocol.wire import ErrorKind

MAX_NAMES: Final = 4096


class SentImages:
    """What a client knows of the images of one core."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, None] = OrderedDict()
        """The images that were sent, the one used longest ago first."""
        self.open: dict[str, EngineCoreRequest] = {}
        """Requests that were sent with names in place of tiles, until the core has begun with
        them; whole."""

    def to_send(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """Return the message for a request, without the tiles that the core has."""
        features = request.mm_features or []
        known = {each.identifier for each in features if each.identifier in self._names}
        for feature in features:
            self._names[feature.identifier] = None
            self._names.move_to_end(feature.identifier)
        while len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)
        if not known:
            return request
        self.open[request.request_id] = request
        return msgspec.structs.replace(
            request, mm_features=[without_tiles(each, known) for each in features]
        )

    def to_send_again(self, message: EngineCoreOutputs) -> list[EngineCoreRequest]:
        """Return complete requests whose images the core lacks after all, and remove their outputs
        from the message."""
        again = []
        for output in list(message.outputs):
            request = self.open.pop(output.request_id, None)
            if request is None or output.error_kind is not ErrorKind.MISSING_IMAGE:
                continue
            message.outputs.remove(output)
            if message.finished_requests is not None:
                message.finished_requests.discard(output.request_id)
            for feature in request.mm_features or ():
                self._names.pop(feature.identifier, None)
            again.append(request)
        return again

    def ended(self, request_ids: Iterable[str]) -> None:
        """Record that nobody waits for these requests any more."""
        if self.open:
            for request_id in request_ids:
                self.open.pop(request_id, None)

    def forget(self) -> None:
        """Forget all, because another core answers from now on, or the same one after a restart."""
        self._names.clear()
        self.open.clear()


def without_tiles(feature: MultiModalFeatureSpec, names: Iterable[str]) -> MultiModalFeatureSpec:
    """Return a feature without its data, if its name is among these."""
    if feature.identifier not in names:
        return feature
    return msgspec.structs.replace(feature, data=None)
