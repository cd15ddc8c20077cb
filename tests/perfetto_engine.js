// Perfetto's own trace processor between stdin and stdout: node perfetto_engine.js FOLDER, where FOLDER has the viewer's
// engine_bundle.js and trace_processor*.wasm. The engine is made for a worker of a browser, which this stands in for.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [folder, { stdin, stdout, stderr }] = [process.argv[2], process];

globalThis.self = globalThis;
globalThis.WorkerGlobalScope = globalThis;
globalThis.location = { href: "file:///" };
globalThis.process = undefined; // by which it would know Node
globalThis.XMLHttpRequest = class {
    open(_, name) {
        this.name = path.basename(name);
    }
    send() {
        this.response = fs.readFileSync(path.join(folder, this.name));
    }
};
console.log = console.warn = (text) => stderr.write(`${text}\n`);
vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));

const port = { postMessage: (bytes) => stdout.write(bytes) };
globalThis.onmessage({ data: port });
stdin.on("data", (chunk) => port.onmessage({ data: new Uint8Array(chunk) }));
