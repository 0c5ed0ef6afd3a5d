# setup | demo | test | check | bench | soak | proto: nothing else to know.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := session store admin

.PHONY: setup demo test check bench soak proto format

proto:  ## generate tierd/api from proto/
	$(call generate,.)

generate = PATH=$(BIN):$$PATH $(BIN)/python -m grpc_tools.protoc -Itierd/api=proto/tierd/v1 \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=$(1) --mypy_grpc_out=$(1) \
	$(PROTOS:%=tierd/api/%.proto)
