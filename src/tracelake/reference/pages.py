"""Every file of ``docs`` that is made of the code, and who makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tracelake.domain.dag.schema import schema_text
from tracelake.evm.schemas_page import schemas_page
from tracelake.reference.http_page import http_page
from tracelake.reference.operators_page import operators_page
from tracelake.reference.yaml_page import yaml_page

PAGES: Mapping[str, Callable[[], str]] = {
    "dag.schema.json": schema_text,
    "http.md": http_page,
    "operators.md": operators_page,
    "schemas.md": schemas_page,
    "yaml.md": yaml_page,
}
