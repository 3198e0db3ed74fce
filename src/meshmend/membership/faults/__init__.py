"""What can fail in a run: faults as values, and fault injection.

A fault passes through these modules from left to right:

    --inject TEXT -> fault.py -> fault_injector.py -> JobControl (launch/job_processes.py)
                                                   -> SelfInjection, inside a worker

To add a kind of fault, add a member to `FaultKind` and its rules; mypy then names each `match` that
lacks it.

| file                          | what to add                                                     |
| ----------------------------- | --------------------------------------------------------------- |
| fault.py                      | the member, and a row of rules: targets, duration, effect       |
| fault_injector.py             | what it does                                                    |
| launch/job_processes.py       | only if `JobControl` needs one more method for it               |
| benchmarks/random_faults.py   | only if random runs should have it: a method and its weight     |
| tests/membership/faults       | the kind in generated_faults.py, errors, an example by hand     |
| membership/job_view.py        | how the live display shows the chips of such a fault            |
| config.py, docs/failures.md   | an example for users                                            |

Events and reports hold the kind as a value of `FaultKind`.
"""
