"""Photos, recordings and labels: what people have, as what models take and return.

May import `hal`. `nnfmq.images`, `nnfmq.audio` and the commands are made of these modules.
"""
