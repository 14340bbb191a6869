"""The suite of latency stress tests with which a user accepts a machine: `nnfmq stress --suite`.

`thresholds` reads what the machine has to achieve, `scenarios` lists what happens beside the measured clients,
`clients` and `peer_death` have the processes, `run` measures, `outcomes` compares with thresholds and an earlier run,
and `report` writes JSON, JUnit XML and a page. The load is an open loop: latency counts from the intended start of each
request.
"""
