"""What failures cost a training job over weeks and years, and which answer to them is best.

`forecast` runs a job on a mesh through many simulated years of failures and repairs, once for each
answer: wait for the repair, train on a sub-mesh, switch in spares, or go on around the hole. All
answers see the same failures. The model is in docs/design/0008-forecast.md.
"""
