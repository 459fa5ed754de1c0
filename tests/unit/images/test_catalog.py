"""Names of environments and what becomes of their layers."""

import subprocess
import sys
from pathlib import Path

import pytest

from dsec.api.errors import Conflict, ImageError, InvalidRequest, NotFound
from dsec.images import Catalog, Layer


def add_layer(catalog: Catalog, tree: Path, content: str) -> Layer:
    tree.mkdir()
    (tree / "file").write_text(content)
    with catalog.layers.writing() as staging:
        layer = catalog.layers.add(tree, staging, source="test", packages={})
        catalog.put(f"keeper-{content}", [layer.digest])
    return layer


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "images")


def test_what_was_put_is_resolved(catalog: Catalog, tmp_path: Path) -> None:
    layer = add_layer(catalog, tmp_path / "tree", "a")
    put = catalog.put("app:v1", [layer.digest], env={"A": "1"}, workdir="/w", user="dev")
    assert catalog.resolve("app:v1") == put
    assert (put.name, put.layers, put.env, put.workdir, put.user) == (
        "app:v1",
        (layer.digest,),
        {"A": "1"},
        "/w",
        "dev",
    )
    assert catalog.size(put) == layer.size == catalog.layers.path(layer.digest).stat().st_size


def test_a_name_alone_means_latest(catalog: Catalog, tmp_path: Path) -> None:
    layer = add_layer(catalog, tmp_path / "tree", "a")
    catalog.put("app", [layer.digest])
    assert catalog.resolve("app").name == "app:latest"


def test_an_unknown_name_lists_what_there_is(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"there are none.*image bootstrap debian"):
        catalog.resolve("nothing")
    add_layer(catalog, tmp_path / "tree", "a")
    with pytest.raises(ImageError, match="there are: keeper-a:latest"):
        catalog.resolve("nothing")


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "A", "a:", ":a", "a:b:c", "a b", "a\n", "x" * 65, "a:" + "t" * 65, "@shared"]
)
def test_what_is_no_name_is_an_invalid_request(catalog: Catalog, name: str) -> None:
    with pytest.raises(InvalidRequest):
        catalog.resolve(name)


def test_a_projects_image_is_its_own_and_comes_first(catalog: Catalog, tmp_path: Path) -> None:
    shared = add_layer(catalog, tmp_path / "shared", "a")
    own = add_layer(catalog, tmp_path / "own", "b")
    catalog.put("app", [shared.digest])
    catalog.put("app", [own.digest], project="p1")
    catalog.put("secret", [own.digest], project="p1")
    assert catalog.resolve("app", project="p1").layers == (own.digest,)
    assert catalog.resolve("app", project="p2").layers == (shared.digest,)
    with pytest.raises(ImageError):
        catalog.resolve("secret", project="p2")
    assert "secret:latest" not in {environment.name for environment in catalog.list(project="p2")}
    assert [environment.layers for environment in catalog.list(project="p1") if environment.name == "app:latest"] == [
        (own.digest,)
    ]


@pytest.mark.parametrize("project", ["../x", "@shared", "", "a/b"])
def test_what_is_no_project_is_refused(catalog: Catalog, project: str) -> None:
    with pytest.raises(InvalidRequest):
        catalog.resolve("app", project=project)


def test_a_layer_goes_with_its_last_name(catalog: Catalog, tmp_path: Path) -> None:
    layer = add_layer(catalog, tmp_path / "tree", "a")
    catalog.put("again", [layer.digest], project="p1")
    assert catalog.remove("keeper-a") == 0
    assert catalog.layers.path(layer.digest).exists()
    assert catalog.remove("again", project="p1") == layer.size
    assert not catalog.layers.digests()
    with pytest.raises(NotFound):
        catalog.remove("again", project="p1")


def test_an_environment_needs_its_layers(catalog: Catalog) -> None:
    with pytest.raises(ImageError, match="not in the image store"):
        catalog.put("app", ["sha256:" + "0" * 64])
    with pytest.raises(ImageError, match="not a layer digest"):
        catalog.put("app", ["sha256:../../etc/passwd"])
    assert not catalog.list()


def test_equal_trees_are_one_layer(catalog: Catalog, tmp_path: Path) -> None:
    first = add_layer(catalog, tmp_path / "one", "same")
    other = tmp_path / "two"
    other.mkdir()
    subprocess.run(["cp", "-a", f"{tmp_path}/one/.", other], check=True)
    with catalog.layers.writing() as staging:
        second = catalog.layers.add(other, staging, source="test", packages={})
    assert second.digest == first.digest
    assert len(catalog.layers.digests()) == 1


def test_one_writer_at_a_time_and_nothing_is_left_of_an_interrupted_one(catalog: Catalog, tmp_path: Path) -> None:
    with catalog.layers.writing(), pytest.raises(Conflict), catalog.layers.writing():
        pass
    code = (
        "import os, sys; from pathlib import Path; from dsec.images import LayerStore\n"
        f"with LayerStore(Path({str(tmp_path / 'images')!r})).writing() as staging:\n"
        "    (staging / 'half').write_text('x'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == -9
    assert (tmp_path / "images/staging/half").exists()
    with catalog.layers.writing() as staging:
        assert not list(staging.iterdir())
    assert not (tmp_path / "images/staging").exists()


def test_a_failed_packing_changes_nothing(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="cannot be packed"), catalog.layers.writing() as staging:
        catalog.layers.add(tmp_path / "missing", staging, source="test", packages={})
    assert not catalog.layers.digests()


def test_a_damaged_record_is_an_image_error(catalog: Catalog, tmp_path: Path) -> None:
    add_layer(catalog, tmp_path / "tree", "a")
    (tmp_path / "images/names/@shared/bad:latest.json").write_text("{")
    with pytest.raises(ImageError, match="cannot be read"):
        catalog.resolve("bad")
