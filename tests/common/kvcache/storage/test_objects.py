"""Objects of a KV storage: names, headers, and pages that ranks of other tensor-parallel sizes assemble."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from baton.common.api.identity import ModelIdentity
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.storage import objects
from baton.common.kvcache.storage.fingerprint import StoredPool, storage_digest
from baton.common.kvcache.storage.objects import HEADER_BYTES, ObjectFormat
from baton.common.kvcache.storage.page_shape import PageShape, PoolShape, Rectangle
from baton.tests.helpers.stored_pages import DIGEST, FakeHost, content, key_of, rank_shape

KEY = key_of(1)


def sealed(shape: PageShape, key: bytes = KEY, digest: str = DIGEST) -> np.ndarray:
    form = ObjectFormat(digest, shape)
    data = np.full(form.num_bytes(shape.own), 7, np.uint8)
    form.body(data, shape.own)[:] = content(shape, key)
    form.seal(key, data)
    return data


def test_a_name_tells_key_digest_layers_and_heads_and_nothing_of_the_rank():
    name = ObjectFormat(DIGEST, rank_shape(1, 2)).name(KEY, rank_shape(1, 2).own)
    assert name == f"{KEY.hex()}_{DIGEST}_L0-3_H4-8"
    one = rank_shape()
    assert ObjectFormat(DIGEST, one).name(KEY, Rectangle(2, 1)) == name
    latents = [ObjectFormat(DIGEST, shape).name(KEY, shape.own)
               for shape in (rank_shape(rank, 4, latent=True, draft=False) for rank in range(4))]
    assert len(set(latents)) == 1 and latents[0].endswith("_L0-3_H0-1")


def test_one_of_the_ranks_that_repeat_the_same_heads_writes():
    def writers(size, **form):
        return [rank for rank in range(size) if rank_shape(rank, size, **form).is_writer]

    assert writers(8) == list(range(8)) and writers(16) == list(range(0, 16, 2))
    assert writers(4, latent=True, draft=False) == [0]
    assert writers(4, latent=True) == [0, 2]  # the draft's heads differ


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("readers", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("writers", [1, 2, 4, 8, 16])
def test_a_page_is_assembled_from_the_objects_of_any_size(writers, readers, latent):
    stored = {}
    for rank in range(writers):
        shape = rank_shape(rank, writers, groups=(3,), latent=latent)
        if shape.is_writer:
            stored[ObjectFormat(DIGEST, shape).name(KEY, shape.own)] = sealed(shape)
    for rank in range(readers):
        shape = rank_shape(rank, readers, latent=latent)
        form, host = ObjectFormat(DIGEST, shape), FakeHost(shape, 1)
        source = next(source for source in shape.sources
                      if all(form.name(KEY, rectangle) in stored for rectangle in source))
        for rectangle in source:
            data = stored[form.name(KEY, rectangle)]
            assert data.nbytes == form.num_bytes(rectangle) and form.check(KEY, rectangle, data) == "ok"
            shape.unpack(rectangle, form.body(data, rectangle), host.slot_views(0))
        assert (host.bytes_of(0) == content(shape, KEY)).all()


def test_heads_that_do_not_split_alike_are_not_joined():
    pools = PoolShape(1, 2, 6, 8), PoolShape(1, 2, 4, 8)
    shape = PageShape(pools, range(2), 1, 2)
    assert [[each.split for each in source] for source in shape.sources] == [[2], [1]]


@pytest.mark.parametrize("offset", [0, 7, 9, 20, 60, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 100, -1])
def test_a_changed_byte_shows(offset):
    shape = rank_shape()
    form, data = ObjectFormat(DIGEST, shape), sealed(shape)[:HEADER_BYTES + shape.body_bytes(shape.own)]
    data[offset] ^= 1
    assert form.check(KEY, shape.own, data) == "corrupt"


def test_the_bytes_after_the_body_are_zeros_up_to_4_kib():
    shape = rank_shape()
    data = sealed(shape)
    assert data.nbytes % 4096 == 0 and not data[HEADER_BYTES + shape.body_bytes(shape.own):].any()


def test_an_object_of_another_key_digest_or_layout_is_foreign():
    shape = rank_shape()
    form, data = ObjectFormat(DIGEST, shape), sealed(shape)
    assert form.check(key_of(2), shape.own, data) == "foreign"
    assert form.check(KEY, shape.own, sealed(shape, digest="f" * 32)) == "foreign"
    assert form.check(KEY, Rectangle(2, 0), data) == "foreign"
    other = rank_shape(draft=False)
    assert ObjectFormat(DIGEST, other).check(KEY, other.own, data) == "foreign"
    moved = dataclasses.replace(shape, layers=range(1, 4))
    assert ObjectFormat(DIGEST, moved).check(KEY, shape.own, data) == "foreign"


def test_an_object_is_read_with_the_checksum_it_was_written_with(monkeypatch):
    """An image without xxhash reads and writes CRC-32, and does not use what it cannot check."""
    shape = rank_shape()
    fast = sealed(shape)
    everything = objects._checksums()
    monkeypatch.setattr(objects, "_checksums", lambda: {1: everything[1]})
    plain = ObjectFormat(DIGEST, shape)
    assert plain.check(KEY, shape.own, fast) == "unchecked"
    slow = sealed(shape)
    assert plain.check(KEY, shape.own, slow) == "ok"
    monkeypatch.undo()
    assert ObjectFormat(DIGEST, shape).check(KEY, shape.own, slow) == "ok"


LAYOUT = KVLayout((2, 1), 4, 8, 16, "float16", windows=(None, 4, None))
MODEL = ModelIdentity("aa", "somewhere")


def digest(layout=LAYOUT, heads=8, model=MODEL, **facts):
    return storage_digest(model, [StoredPool(layout, heads)], **facts)


def changed(**fields):
    return type(LAYOUT)(**{name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__} | fields)


def test_the_digest_does_not_depend_on_the_topology():
    assert len(digest()) == 32
    assert digest() == digest(changed(groups=(1, 1, 1))) == digest(changed(num_kv_heads=1))
    assert digest() == digest(model=ModelIdentity("aa", "elsewhere", 0))


def test_the_digest_depends_on_all_that_the_content_does():
    draft = StoredPool(KVLayout((1,), 2, 8, 16, "float16"), 2, is_draft=True)
    others = [
        digest(heads=4), digest(model=ModelIdentity("ab", "somewhere")), digest(weight_version="2"),
        digest(compute=("bfloat16", None)), digest(lookahead=1), digest(draft=MODEL),
        digest(changed(head_dim=4)), digest(changed(page_size=8)), digest(changed(dtype="bfloat16")),
        digest(changed(form="latent")), digest(changed(scales=((1.0, 0.5),) * 3)), digest(changed(windows=())),
        digest(changed(first_layer=3, of_layers=6)), digest(changed(layers=(0, 2, 4))),
        digest(changed(retained_tokens=4)), digest(changed(channel_order="ab")),
        storage_digest(MODEL, [StoredPool(LAYOUT, 8), draft]),
        storage_digest(MODEL, [StoredPool(LAYOUT, 8), dataclasses.replace(draft, is_draft=False)])]
    assert len({digest(), *others}) == len(others) + 1
