"""What a refused expert means on the node's side."""

from __future__ import annotations

from tierd.api import session_pb2 as pb
from tierd.errors import DaemonUnavailable, DataLoss, DeadlineExceeded, DriveError, TierdError

__all__ = ["refusal_error"]


def refusal_error(layer: int, failed: pb.Failed) -> TierdError:
    """The error for an expert of the layer that will not come."""
    match failed.reason:
        case pb.REASON_DATA_LOSS:
            return DataLoss(failed.detail)
        case pb.REASON_DEADLINE_EXCEEDED:
            return DeadlineExceeded(failed.detail)
        case pb.REASON_UNAVAILABLE:
            return DriveError(failed.detail)
        case _:
            return DaemonUnavailable(f"layer {layer} expert {failed.expert}: {failed.detail}")
