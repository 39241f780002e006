"""Bundles over HTTP: pushed once under their hash, checked before they are kept, fetched as they came."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.surfaces import Surfaces, open_surfaces
from tracelake.dispatcher.api import functions
from tracelake.dispatcher.steps.context import StepContext


def zipped(**files: str) -> bytes:
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name.replace("__", ".")), text)
    return into.getvalue()


BUNDLE = zipped(main__py="def handler(event, context): return 1\n", util__py="")
HASH = hashlib.sha256(BUNDLE).hexdigest()


@pytest.fixture
async def api(ctx: StepContext) -> AsyncIterator[Surfaces]:
    async with open_surfaces(ctx) as surfaces:
        yield surfaces


def kept(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_a_pushed_bundle_is_kept_under_its_hash_and_fetched_as_it_came(
    api: Surfaces, tmp_path: Path
) -> None:
    answer = await api.person.post("/v1/bundles", content=BUNDLE)
    assert answer.status_code == 201, answer.text
    pushed = answer.json()
    assert (pushed["bundle"], pushed["bytes"]) == (f"sha256:{HASH}", len(BUNDLE))
    assert (pushed["files"], pushed["names"]) == (2, ["main.py", "util.py"])
    assert [path.relative_to(tmp_path / "objects") for path in kept(tmp_path / "objects")] == [
        Path(f"bundle/{HASH}.zip")
    ]
    fetched = await api.worker.get("/internal/bundle", params={"sha256": HASH})
    assert (fetched.status_code, fetched.content) == (200, BUNDLE)
    assert fetched.headers["content-type"] == "application/zip"


async def test_the_same_bundle_twice_is_one_bundle(api: Surfaces, tmp_path: Path) -> None:
    first = await api.person.post("/v1/bundles", content=BUNDLE)
    again = await api.person.post("/v1/bundles", content=BUNDLE)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert len(kept(tmp_path / "objects")) == 1
    assert len((await api.person.get("/v1/bundles")).json()["bundles"]) == 1


async def test_a_push_repairs_a_file_that_was_lost_or_cut_off(api: Surfaces, tmp_path: Path) -> None:
    file = tmp_path / "objects" / "bundle" / f"{HASH}.zip"
    await api.person.post("/v1/bundles", content=BUNDLE)
    file.unlink()
    lost = await api.worker.get("/internal/bundle", params={"sha256": HASH})
    assert (lost.status_code, lost.json()["reason"]) == (404, "BundleLost")
    assert (await api.person.post("/v1/bundles", content=BUNDLE)).status_code == 200
    assert file.read_bytes() == BUNDLE
    file.write_bytes(BUNDLE[:10])
    assert (await api.person.post("/v1/bundles", content=BUNDLE)).status_code == 200
    assert file.read_bytes() == BUNDLE


async def test_bundles_are_listed_in_pages_and_shown_by_reference(api: Surfaces) -> None:
    for number in range(3):
        await api.person.post("/v1/bundles", content=zipped(main__py=f"x = {number}\n"))
    page = (await api.person.get("/v1/bundles", params={"limit": 2})).json()
    rest = (await api.person.get("/v1/bundles", params={"limit": 2, "after": page["next"]})).json()
    assert (len(page["bundles"]), len(rest["bundles"]), rest["next"]) == (2, 1, None)
    reference = rest["bundles"][0]["bundle"]
    for name in (reference, reference.removeprefix("sha256:")):
        assert (await api.person.get(f"/v1/bundles/{name}")).json()["bundle"] == reference
    for name in ("sha256:" + "0" * 64, "main.py", "0" * 64):
        missing = await api.person.get(f"/v1/bundles/{name}")
        assert (missing.status_code, missing.json()["reason"]) == (404, "UnknownBundle")


async def test_what_is_too_large_is_refused_announced_or_not(
    api: Surfaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "MAX_BUNDLE_BYTES", len(BUNDLE) - 1)

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(BUNDLE), 100):
            yield BUNDLE[at : at + 100]

    for content in (BUNDLE, pieces()):
        answer = await api.person.post("/v1/bundles", content=content)
        assert (answer.status_code, answer.json()["reason"]) == (413, "TooLarge")
    assert kept(tmp_path / "objects") == []


@pytest.mark.parametrize("content", [b"", b"not a zip", BUNDLE[:-3], zipped(**{"../evil": ""}), zipped()])
async def test_what_is_no_bundle_is_refused_and_leaves_nothing(
    api: Surfaces, tmp_path: Path, content: bytes
) -> None:
    answer = await api.person.post("/v1/bundles", content=content)
    assert (answer.status_code, answer.json()["reason"]) == (422, "InvalidBundle")
    assert kept(tmp_path / "objects") == []
    assert (await api.person.get("/v1/bundles")).json()["bundles"] == []


async def test_a_bundle_is_fetched_by_its_hash_and_nothing_else(api: Surfaces) -> None:
    await api.person.post("/v1/bundles", content=BUNDLE)
    for wrong in ("", "x", HASH.upper(), f"sha256:{HASH}", HASH[:-1], "../" + HASH, HASH + "\n"):
        assert (await api.worker.get("/internal/bundle", params={"sha256": wrong})).status_code == 422
    unknown = await api.worker.get("/internal/bundle", params={"sha256": "0" * 64})
    assert (unknown.status_code, unknown.json()["reason"]) == (404, "UnknownBundle")


DAG = """
name: fn
jobs:
  - {{ name: src, activation: source, runtime: lambda, source: {{ kind: manual }}, outputs: 1 }}
  - name: work
    activation: reactive
    runtime: {runtime}
    {what}
    inputs: [{{ from: {{ job: src, output: 0 }} }}]
    outputs: [{{ name: out, storage: none }}]
    execution_strategy: PerPartition
"""
UDF = "udf: {{ bundle: '{bundle}', entrypoint: {entrypoint} }}"


def with_job(what: str, runtime: str = "lambda") -> str:
    return DAG.format(what=what, runtime=runtime)


@pytest.mark.parametrize(
    ("bundle", "entrypoint", "field", "why"),
    [
        (f"sha256:{HASH}", "main.handler", None, None),
        ("sha256:" + "0" * 64, "main.handler", "bundle", "push it first"),
        (HASH, "main.handler", "bundle", "sha256: and 64 hex digits"),
        (f"sha256:{HASH}0", "main.handler", "bundle", "sha256: and 64 hex digits"),
        ("./my_function", "main.handler", "bundle", "tracelake bundle push"),
        (f"sha256:{HASH}", "other.handler", "entrypoint", "neither other.py"),
        (f"sha256:{HASH}", "main", "entrypoint", "module.function"),
    ],
)
async def test_a_deploy_needs_a_bundle_that_is_here_and_an_entrypoint_that_it_has(
    api: Surfaces, bundle: str, entrypoint: str, field: str | None, why: str
) -> None:
    await api.person.post("/v1/bundles", content=BUNDLE)
    yaml = with_job(UDF.format(bundle=bundle, entrypoint=entrypoint))
    answer = await api.person.post("/v1/dags", content=yaml)
    if field is None:
        assert answer.status_code == 201, answer.text
        return
    [error] = answer.json()["errors"]
    assert (answer.status_code, error["line"], error["field"]) == (422, 8, f"jobs[1].udf.{field}")
    assert why in error["message"]


async def test_lambda_runs_functions_and_noop_and_other_runtimes_run_no_functions(api: Surfaces) -> None:
    await api.person.post("/v1/bundles", content=BUNDLE)
    udf = UDF.format(bundle=f"sha256:{HASH}", entrypoint="main.handler")
    wrong = {
        with_job("operator: range_splitter\n    config: { chunk_size: 5 }"): "jobs[1].operator",
        with_job("operator: mine"): "jobs[1].operator",
        with_job("operator: udf"): "jobs[1].udf",
        with_job(udf, runtime="ecs_python"): "jobs[1].runtime",
        with_job(udf, runtime="ecs_spark"): "jobs[1].runtime",
    }
    for yaml, field in wrong.items():
        answer = await api.person.post("/v1/dags", content=yaml)
        assert [error["field"] for error in answer.json()["errors"]] == [field], answer.text
    assert (await api.person.post("/v1/dags", content=with_job("operator: noop"))).status_code == 201
    assert (await api.person.post("/v1/dags/plan", content=with_job(udf))).status_code == 200


async def test_another_bundle_makes_another_generation(api: Surfaces) -> None:
    versions = []
    for text in ("a = 1\n", "a = 2\n"):
        pushed = await api.person.post("/v1/bundles", content=zipped(main__py=text))
        yaml = with_job(UDF.format(bundle=pushed.json()["bundle"], entrypoint="main.handler"))
        deployed = (await api.person.post("/v1/dags", content=yaml)).json()
        versions.append(deployed["jobs"][1]["outputs"][0]["dataset_version"])
    assert versions[0] != versions[1]


@pytest.mark.parametrize(
    "body",
    [
        {"url": "http://127.0.0.1:9", "concurrency": -1},
        {"url": "http://127.0.0.1:9"},
        {"url": "ftp://127.0.0.1", "concurrency": 1},
        {"url": "http://user@host", "concurrency": 1},
        {"url": "http://127.0.0.1:9/path", "concurrency": 1},
        {"url": "http://127.0.0.1:9", "concurrency": 1, "more": 1},
    ],
)
async def test_an_invoker_says_exactly_where_it_is(api: Surfaces, body: dict[str, object]) -> None:
    assert (await api.worker.post("/internal/invoker", json=body)).status_code == 422
