"""Switchax: choose a JAX model's attention kernel by name.

What a kernel cannot honour it refuses, with reasons; it never silently computes
something else.
"""

from . import decisions
from ._version import __version__
from .api import attention
from .axes import MODE_DECODE, MODE_INSERT, MODE_PREFILL, MODE_TRAIN
from .capabilities import Capabilities, Cost
from .dispatch import Decision
from .errors import (
    ContestedNameError,
    DecisionLockError,
    DegradedChoiceError,
    DegradedChoiceWarning,
    Refusal,
    RegistrationError,
    SettingsError,
    UnknownOperationError,
    UnsupportedError,
)
from .explanation import Explanation, explain
from .hookspecs import hookimpl
from .kind import Adaptation, Call, Feature, OperationKind, Plan
from .kinds.attention import (
    ATTENTION,
    AttentionOutput,
    AttentionRequest,
    MaskPattern,
)
from .loading import CONTRACT
from .metadata import OperationMetadata
from .operation import BaseOperation
from .partition import PartitionAxis, PartitionManager
from .registrations import add_kind as _add_kind
from .registry import OperationRegistry
from .request import ArraySpec, Request
from .running import run_named
from .settings import Settings, configure, current_settings, use
from .target import Target, current_target

_add_kind(ATTENTION)

__all__ = [
    "ATTENTION",
    "CONTRACT",
    "MODE_DECODE",
    "MODE_INSERT",
    "MODE_PREFILL",
    "MODE_TRAIN",
    "Adaptation",
    "ArraySpec",
    "AttentionOutput",
    "AttentionRequest",
    "BaseOperation",
    "Call",
    "Capabilities",
    "ContestedNameError",
    "Cost",
    "Decision",
    "DecisionLockError",
    "DegradedChoiceError",
    "DegradedChoiceWarning",
    "Explanation",
    "Feature",
    "MaskPattern",
    "OperationKind",
    "OperationMetadata",
    "OperationRegistry",
    "PartitionAxis",
    "PartitionManager",
    "Plan",
    "Refusal",
    "RegistrationError",
    "Request",
    "Settings",
    "SettingsError",
    "Target",
    "UnknownOperationError",
    "UnsupportedError",
    "__version__",
    "attention",
    "configure",
    "current_settings",
    "current_target",
    "decisions",
    "explain",
    "hookimpl",
    "run_named",
    "use",
]
