"""The Open Inference Protocol v2 over an InferenceService: an ASGI application for HTTP, and a gRPC service.

`http` and `grpc` are the two ends, each with its messages; `tensors` and `errors` serve both. Only `grpc` needs
packages beyond the base install: protobuf and grpcio.
"""
