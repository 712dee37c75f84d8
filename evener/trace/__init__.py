"""The trace of a session: what was sampled, as it was sampled, from capture to training rows.

The store is imported from `evener.trace.store`, so that only who needs Redis imports its client.
"""

from evener.trace.classes import CallClass, call_classes
from evener.trace.forks import Fork, ForkCause, find_forks
from evener.trace.graph import Graph, build_graph
from evener.trace.histories import Histories
from evener.trace.record import CallRecord
from evener.trace.sequences import Sequence, Span, build_sequences
from evener.trace.session import SessionSpec, SessionState

__all__ = [
    "CallClass",
    "CallRecord",
    "Fork",
    "ForkCause",
    "Graph",
    "Histories",
    "Sequence",
    "SessionSpec",
    "SessionState",
    "Span",
    "build_graph",
    "build_sequences",
    "call_classes",
    "find_forks",
]
