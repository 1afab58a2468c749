// A client of slime.v1.BufferService, written from the .proto files alone.
//
//   node client.js PROTO_DIR ADDRESS TOKEN_FILE add KEY TEXT...   adds prompts; prints AddPromptsResponse
//   node client.js PROTO_DIR ADDRESS TOKEN_FILE work COUNT        leases COUNT groups, completes them; prints their indexes
//   node client.js PROTO_DIR ADDRESS TOKEN_FILE mutate            leases a group, hands it in as mutations.js says, then whole
//   node client.js PROTO_DIR ADDRESS TOKEN_FILE read STATE        reads groups in that state; prints one object a sample
//
// A failed call prints {code, message} and exits with 1.
"use strict";

const fs = require("fs");
const path = require("path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const { MUTATIONS, VALID } = require("./mutations");

const [protoDirectory, address, tokenFile, command, ...words] = process.argv.slice(2);
const definition = loader.loadSync(path.join(protoDirectory, "slime/v1/buffer.proto"), {
  includeDirs: [protoDirectory],
  keepCase: true,
  longs: Number,
  enums: String,
  defaults: true,
  oneofs: true,
});
const { slime } = grpc.loadPackageDefinition(definition);
const client = new slime.v1.BufferService(address, grpc.credentials.createInsecure());
const token = new grpc.Metadata();
token.set("authorization", "Bearer " + fs.readFileSync(tokenFile, "utf8").trim());
const deadline = () => ({ deadline: Date.now() + 20000 });

// One answer to one request, or to a stream of them.
function call(method, ...requests) {
  return new Promise((resolve, reject) => {
    const done = (error, answer) => (error ? reject(error) : resolve(answer));
    if (!client[method].requestStream) {
      client[method](requests[0], token, deadline(), done);
      return;
    }
    const stream = client[method](token, deadline(), done);
    requests.forEach((request) => stream.write(request));
    stream.end();
  });
}

function collect(method, request) {
  return new Promise((resolve, reject) => {
    const answers = [];
    client[method](request, token, deadline())
      .on("data", (answer) => answers.push(answer))
      .on("error", reject)
      .on("end", () => resolve(answers));
  });
}

// tensor.proto: dense, little-endian.
const ITEMS = { DATA_TYPE_UINT8: [1, "readUInt8"], DATA_TYPE_INT32: [4, "readInt32LE"], DATA_TYPE_FLOAT32: [4, "readFloatLE"] };

function numbers(tensor) {
  if (!tensor) return null;
  const [size, read] = ITEMS[tensor.dtype];
  return Array.from({ length: Number(tensor.shape[0]) }, (_, i) => tensor.inline[read](i * size));
}

function tensor(dtype, values) {
  const [size, read] = ITEMS[dtype];
  const inline = Buffer.alloc(values.length * size);
  values.forEach((value, i) => inline[read.replace("read", "write")](value, i * size));
  return { dtype, shape: [values.length], inline };
}

async function add(key, ...texts) {
  const prompts = texts.map((text) => ({ text, label: text.toUpperCase(), metadata_json: JSON.stringify({ from: "node" }) }));
  // Several messages, as a client with many prompts would send.
  return [await call("AddPrompts", { key }, ...prompts.map((prompt) => ({ prompts: [prompt] })))];
}

async function work(count) {
  const { writer } = await call("GetRun", {});
  const request = { writer, worker_id: "node", max_groups: Number(count), ttl_seconds: 60, wait_seconds: 5 };
  const leased = await collect("LeaseGroups", request);
  for (const { lease, group } of leased) {
    const samples = group.samples.map((sample) => ({
      ...sample,
      tokens: tensor("DATA_TYPE_INT32", [7, 8, 9]),
      response: "made in node",
      response_length: 2,
      loss_mask: tensor("DATA_TYPE_UINT8", [1, 0]),
      rollout_log_probs: tensor("DATA_TYPE_FLOAT32", [-0.5, 0]),
      reward_value: 0.25,
      reward: "reward_value",
      status: "SAMPLE_STATUS_COMPLETED",
    }));
    await call("CompleteGroup", { writer, lease_token: lease.token }, { samples }, { commit: true });
  }
  return leased.map(({ lease }) => lease.group_index);
}

// One object a mutation, {name, field, code, message}; the last is of the group as it should be.
async function mutate() {
  const { writer } = await call("GetRun", {});
  const request = { writer, worker_id: "node", max_groups: 1, ttl_seconds: 600, wait_seconds: 5 };
  const [{ lease, group }] = await collect("LeaseGroups", request);
  const results = [];
  for (const [name, field, change] of [...MUTATIONS, ["nothing wrong", "", {}]]) {
    const samples = group.samples.map((sample) => ({ ...sample, ...VALID }));
    Object.assign(samples[samples.length - 1], change);
    const answered = await call("CompleteGroup", { writer, lease_token: lease.token }, { samples }, { commit: true }).then(
      () => ({ code: 0, message: "" }),
      (error) => ({ code: error.code, message: error.details || error.message }),
    );
    results.push({ name, field, ...answered });
  }
  return results;
}

async function read(state) {
  const answers = await collect("ReadGroups", { states: ["GROUP_STATE_" + state.toUpperCase()] });
  return answers.flatMap(({ group }) =>
    group.samples.map((sample) => ({
      group_index: sample.group_index,
      index: sample.index,
      prompt: sample.prompt_text,
      label: sample.label_text,
      metadata: sample.metadata_json ? JSON.parse(sample.metadata_json) : {},
      tokens: numbers(sample.tokens),
      loss_mask: numbers(sample.loss_mask),
      rollout_log_probs: numbers(sample.rollout_log_probs),
      response: sample.response,
      reward: sample[sample.reward],
      status: sample.status,
    })),
  );
}

Promise.resolve({ add, work, mutate, read }[command](...words)).then(
  (results) => results.forEach((result) => console.log(JSON.stringify(result))),
  (error) => {
    console.log(JSON.stringify({ code: error.code, message: error.details || error.message }));
    process.exitCode = 1;
  },
);
