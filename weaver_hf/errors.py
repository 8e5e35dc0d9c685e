"""The exceptions of weaver_hf. Each says what was found, what was expected, and what to do about it."""


class WeaverError(Exception):
    """Base of all errors that weaver_hf raises on purpose.

    Args:
        found: what the call or file contained.
        expected: what would have been right.
        fix: what the reader can do, a full sentence.
    """

    def __init__(self, found: str, expected: str, fix: str) -> None:
        super().__init__(found, expected, fix)
        self.found, self.expected, self.fix = found, expected, fix

    def __str__(self) -> str:
        return f"Found {self.found}; expected {self.expected}. {self.fix}"


class InvalidTreeError(WeaverError, ValueError):
    """A token tree breaks the contract of `TokenTree`."""


class TreeConfigError(WeaverError, ValueError):
    """A tree setting has a value that cannot be used."""


class UnsupportedModelError(WeaverError, ValueError):
    """The target is of a family, version or wrapping that weaver_hf does not support."""


class UnsupportedOptionError(WeaverError, ValueError):
    """An argument of `generate` that assisted decoding with a Weaver does not support."""


class UnsupportedCacheError(UnsupportedOptionError):
    """A key/value cache that a tree cannot be verified on."""


class EmptyPromptError(WeaverError, ValueError):
    """`generate` was given no token to continue from."""


class NotAttachedError(WeaverError, RuntimeError):
    """The Weaver passed to `generate` is not attached to this model."""


class CheckpointError(WeaverError, ValueError):
    """A folder or file cannot be loaded as a Weaver, or does not fit the target."""


class MissingDrafterError(WeaverError, RuntimeError):
    """The Weaver has no learned drafter, and the call needs one."""


class MissingAdapterError(WeaverError, RuntimeError):
    """The Weaver has no adapter with weights, and the call needs one."""


class PublishError(WeaverError, ValueError):
    """An artifact lacks what its card must say, so it is not uploaded."""
