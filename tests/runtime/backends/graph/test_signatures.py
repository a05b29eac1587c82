"""The tables of signatures say what the schemas say."""

from __future__ import annotations

import onnx
import pytest

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.dialect.schemas import schemas
from inferencex.runtime.backends.graph.signatures import TABULATED, signature_in_schema, signature_of


@pytest.mark.parametrize(("domain", "op_type"), TABULATED)
def test_a_row_is_what_the_schema_says(domain: str, op_type: str) -> None:
    assert signature_of(domain, op_type) == signature_in_schema(domain, op_type) is not None


def test_the_table_has_the_whole_dialect() -> None:
    assert {name for domain, name in TABULATED if domain == DOMAIN} == set(schemas())


def test_other_operators_are_looked_up() -> None:
    assert ("", "Einsum") not in TABULATED
    einsum = signature_of("", "Einsum")
    assert einsum is not None and einsum.needed == {"equation"}
    assert einsum.attributes == {"equation": onnx.AttributeProto.STRING}
    assert signature_of("", "NoSuchOperator") is None and signature_of("elsewhere", "Add") is None
