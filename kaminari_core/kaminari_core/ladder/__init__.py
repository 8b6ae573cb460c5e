"""The ladder: each step that makes decoding faster, measured beside the stock implementation in one run.

`rungs` says what is measured, `contenders` makes each rung runnable over shared weights, `bandwidth`, `accuracy` and `memory`
measure what stands beside the speed, `climb` takes turns and writes the report.
"""
