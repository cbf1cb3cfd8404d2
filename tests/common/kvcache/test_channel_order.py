"""The order of keys' channels: from a file, of a rank's heads, and joined of query heads that share a key."""

import json

import numpy as np
import pytest

from baton.common.config.server import ModelArgs, SparsityArgs
from baton.common.kvcache.channel_order import ChannelOrder
from baton.common.models.registry import load_model_spec
from baton.tests.helpers.channel_files import save_random_channels

SPEC = load_model_spec(ModelArgs(model_path="tinychat"))  # 7 layers, 8 heads over 4, each 64 wide


@pytest.fixture
def order(tmp_path):
    return ChannelOrder.read(SparsityArgs(True, str(save_random_channels(tmp_path, 7, 4, 64))), SPEC)


def test_without_the_flag_there_is_none():
    assert ChannelOrder.read(SparsityArgs(), SPEC) is None


def test_ranks_have_the_orders_of_their_heads(order):
    assert order.channels.shape == (7, 4, 64) and order.channels.dtype == np.int32
    assert np.array_equal(order.of_rank(range(7), 0, 1), order.channels)
    assert np.array_equal(order.of_rank([2, 3], 1, 2), order.channels[2:4, 2:])
    shared = [order.of_rank([0], rank, 8)[0] for rank in range(8)]  # two ranks a head
    assert np.array_equal(np.concatenate(shared), order.channels[0].repeat(2, 0))


def test_digests_tell_orders_apart(order, tmp_path):
    other = ChannelOrder.read(SparsityArgs(True, str(save_random_channels(tmp_path, 7, 4, 64, seed=1))), SPEC)
    again = ChannelOrder(order.channels.copy())
    assert order.digest == again.digest != other.digest and len(order.digest) == 16


def test_query_heads_that_share_a_key_are_joined_by_mean_places(tmp_path):
    first, second = list(range(64)), [2, 0, 1, *range(3, 64)]
    path = tmp_path / "channels.json"
    path.write_text(json.dumps({f"model.layers.{layer}.self_attn.q_proj": [first, second] * 4 for layer in range(7)}))
    order = ChannelOrder.read(SparsityArgs(True, str(path), ds_heavy_channel_type="q"), SPEC)
    assert order.channels[6, 3, :4].tolist() == [0, 2, 1, 3]  # places 0 + 1, 2 + 0, 1 + 2
