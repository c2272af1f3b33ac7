"""What the cases of all kernels share: a name made of what is unusual about them."""

from typing import Any, ClassVar


class NamedCase:
    """Base of frozen dataclasses whose fields all have defaults."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    # Fields that are told elsewhere.
    unnamed: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        """What differs from the default, for test ids."""
        default = type(self)()
        parts = [
            f"{field}={getattr(self, field)}"
            for field in self.__dataclass_fields__
            if field not in self.unnamed and getattr(self, field) != getattr(default, field)
        ]
        return ",".join(parts).replace(" ", "") or "default"
