"""The generated pages of ``docs/``: ``python -m scripts.reference`` writes them.

Each page is made from the declarations that the code itself uses, so it can't disagree with them; a test compares
the files with what would be generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scripts.reference.http_page import http_page
from scripts.reference.metrics_page import metrics_page
from scripts.reference.operators_page import operators_page
from scripts.reference.profiles_page import profiles_page
from scripts.reference.schemas_page import schemas_page
from scripts.reference.yaml_page import yaml_page
from tracelake.domain.dag.schema import schema_text

PAGES: Mapping[str, Callable[[], str]] = {
    "dag.schema.json": schema_text,
    "http.md": http_page,
    "metrics.md": metrics_page,
    "operators.md": operators_page,
    "profiles.md": profiles_page,
    "schemas.md": schemas_page,
    "yaml.md": yaml_page,
}
