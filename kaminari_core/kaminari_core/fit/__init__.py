"""The memory plan: what a model will take and what fits, worked out from config.json and tensor headers before anything loads.

    Footprint (facts, from the model package) + tensor headers -> Weights -> Plan -> Answer: the largest page, slots, length
    Budget (what the machine has, or --vram)  ------------------------------^

The seam to the model packages is `Footprint`: frozen numbers, made by a light function that `ModelSpec.footprint` names. Nothing
in this package imports torch, so that the question "will it fit" is answered at once, also for a card that is not there.
"""

from kaminari_core.fit.facts import Footprint, PictureFootprint, StoredTensor

__all__ = ["Footprint", "PictureFootprint", "StoredTensor"]
