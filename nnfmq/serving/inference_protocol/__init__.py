"""The Open Inference Protocol v2 over an InferenceService: an ASGI application for HTTP, and a gRPC service.

`asgi_app` and `grpc_service` are the two ends. `rest_codec` and `grpc_codec` convert requests and responses,
`status_mapping` errors. Of these only the gRPC modules need packages beyond the base install: protobuf and grpcio.
"""
