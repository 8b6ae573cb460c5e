"""How well a model reads: sets of pages with their truths, metrics, and reports of what was read.

    layouts -> Sample -> reading (the engine) -> Reading -> scoring -> Summary -> report | report_html | sweep

Edit distances, alignments and tree distances come from jiwer, rapidfuzz and apted (the extra `kaminari-core[eval]`); nothing here
is imported by the engine.
"""
