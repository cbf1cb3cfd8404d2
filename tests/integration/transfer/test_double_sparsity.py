"""A pair of servers with double sparsity: the prefill server of two ranks stores keys in the order in which the decode
server reads a part of them, and answers stay right."""

from __future__ import annotations

import pytest

from baton.calibrate_double_sparsity import main
from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.harness import Cluster
from baton.tests.integration.transfer.test_layouts import assert_answers_are_right


@pytest.fixture(scope="module")
def channels(tmp_path_factory):
    path = tmp_path_factory.mktemp("channels") / "channels.json"
    main(["--model-path", "tinychat", "--device", "cpu", "--text-file", str(CHECKPOINT / "MODEL.md"), "--output-file",
          str(path), "--num-samples", "3", "--block-size", "300"])
    return path


@pytest.mark.timeout(300)
async def test_answers_of_a_sparse_pair_are_right(tmp_path, channels):
    """Needles in contexts of which half of the channels choose a part; the second time from both prefix caches."""
    sparse = ["--enable-double-sparsity", "--ds-channel-config-path", str(channels)]
    few = ["--ds-heavy-channel-num", "16", "--ds-heavy-token-num", "32", "--ds-sparse-decode-threshold", "40"]
    with Cluster(tmp_path,
                 prefill_flags=[*sparse, "--tp-size", "2", "--page-size", "32", "--chunked-prefill-size", "80"],
                 decode_flags=[*sparse, *few, "--page-size", "16", "--enable-hierarchical-cache"]) as cluster:
        await assert_answers_are_right(cluster)
