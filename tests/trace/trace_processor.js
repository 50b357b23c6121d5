// The trace processor of a Perfetto UI build, in Node: answers the RPC stream in standard input on standard output.
// Argument: the build's folder, with engine_bundle.js and the .wasm files that it asks for.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];

class XMLHttpRequest {
  open(method, name) {
    this.name = name;
  }
  send() {
    this.response = new Uint8Array(fs.readFileSync(path.join(folder, this.name))).buffer;
  }
}

// The engine is made for a web worker. In a context of its own it sees what a worker has, and nothing of Node.
const log = (...words) => console.error(...words);
const worker = vm.createContext({
  XMLHttpRequest, TextDecoder, crypto, performance,
  WorkerGlobalScope: Object, location: { href: "" }, console: { log, warn: log, error: log },
});
worker.self = worker;
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), worker);

const port = { postMessage: (reply) => fs.writeFileSync(1, reply) };
worker.onmessage({ data: port });
setImmediate(() => { // once the engine has noted that it is ready
  worker.input = fs.readFileSync(0);
  port.onmessage({ data: vm.runInContext("new Uint8Array(input)", worker) });
});
