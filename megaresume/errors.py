"""Every error megaresume raises on purpose, by name.

An error is a sentence for the person on call: which file or field, what was expected, what was found, and the way out.
Each class says what the caller can still rely on afterwards. This module knows nothing of the rest of the package.
"""

from __future__ import annotations


class MegaresumeError(Exception):
    """Base of all errors raised on purpose; catch it to tell them from bugs."""


class ConfigurationError(MegaresumeError, ValueError):
    """The arguments cannot be served (a value out of range, a path that is not usable as a root). Nothing was
    touched."""


class UnsupportedError(MegaresumeError):
    """Something in the live run whose state megaresume does not know how to capture; the message names it. Nothing was
    touched."""


class RootError(MegaresumeError):
    """The checkpoint root is a file, not writable, or not the same directory on all hosts. Nothing was touched."""


class CheckpointNotFoundError(MegaresumeError):
    """No checkpoint where one was asked for, or none readable in a root that had committed ones. Nothing was
    touched."""


class CheckpointDamagedError(MegaresumeError):
    """Bytes on disk are not the bytes that were committed: missing, truncated, altered, or another checkpoint's."""


class FormatError(MegaresumeError):
    """A file that is well-formed but not of a shape or version this release reads."""


class TopologyMismatchError(MegaresumeError):
    """The checkpoint's parallel layout is not this run's; the message holds the table of differences. Nothing was
    touched."""


class StateMismatchError(MegaresumeError):
    """The checkpoint's tensors are not this run's (another model, optimizer, or trainable set). Nothing was touched."""


class DataMismatchError(MegaresumeError):
    """Data settings (batch size, seed, shuffle, dataset) differ from the checkpoint's. Nothing was touched."""


class TrainerStateError(FormatError):
    """`trainer_state.json` is unreadable, or a field of it is missing or of the wrong type; the message names the
    field."""


class SaveError(MegaresumeError):
    """A save failed on some rank and was undone on all; earlier checkpoints are untouched and training may go on."""


class SupersededError(SaveError):
    """A newer attempt of this run exists, so this (older) process must not commit any more."""


class ReplayDivergedError(MegaresumeError):
    """Steps trained again after a resume differ from the step log (raised only with `replay="raise"`)."""


class PoisonedError(MegaresumeError):
    """A restore failed half-way and nothing older was readable: live state is undefined and must not be trained or
    saved."""
