"""The base of plexrl.yaml's sections, and the kinds of value that several of them have."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict


def _part(value: float) -> float:
    if 0 < value < 1e-6:
        raise ValueError(f"{value} is neither zero nor 0.000001 or more")
    return value


Count = Annotated[int, Strict(), Field(gt=0)]
Flag = Annotated[bool, Strict()]
Part = Annotated[float, Strict(), Field(ge=0, le=1e9, allow_inf_nan=False), AfterValidator(_part)]


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
