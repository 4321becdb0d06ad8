"""Latent attention: absorbed and expanded are one function, over pages and over a block."""

import dataclasses

import numpy as np

from jaxspec.models.network import Network
from tests.families import family_config, family_model, network_of
from tests.models.test_oracle import Session


def expanded(network: Network) -> Network:
    config = family_config("deepseek_v3")
    assert config.latent is not None
    other = network_of(dataclasses.replace(config, latent=dataclasses.replace(config.latent, absorbed=False)))
    assert other.treedef == network.treedef
    return other


def test_absorbed_equals_expanded():
    network, leaves = family_model("deepseek_v3")
    tokens = np.random.default_rng(0).integers(0, 64, 16).tolist()
    found = []
    for one in (network, expanded(network)):
        session = Session(one, leaves)
        prompt = session.feed_all(tokens[:8], 4)
        block = session.feed(tokens[8:12], keep=2)
        found.append(np.concatenate([prompt, block, session.feed(tokens[12:])]))
    assert found[0].std() > 0.3
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-5)


def test_the_absorbed_cache_holds_one_narrow_row_a_token():
    network, _ = family_model("deepseek_v3")
    sizes = {}
    for name, one in (("absorbed", network), ("expanded", expanded(network))):
        caches = one.init_cache(num_pages=1, page_size=1, dtype=np.dtype("float32"))
        sizes[name] = [leaf.shape for leaf in vars(caches[0]).values() if hasattr(leaf, "shape")]
    assert sizes == {"absorbed": [(2, 1, 1, 1, 12 + 4)], "expanded": [(2, 1, 4, 1, 8 + 4)] * 2}
