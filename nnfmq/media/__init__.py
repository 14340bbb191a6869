"""Photos, recordings and labels: what people have, as what models take and return.

May import `hal`. `nnfmq.read_photo`, `read_audio`, `read_labels` and the commands use these modules.
"""
