// Renders chat templates with @huggingface/jinja, as transformers.js does: a request and its answer are a line of JSON.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";

const { Template } = createRequire(`${process.argv[2]}/package.json`)("@huggingface/jinja");
let source = null;
let template = null;

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  let answer;
  try {
    if (request.source !== source) {
      template = new Template(request.source);
      source = request.source;
    }
    answer = { text: template.render(request.values) };
  } catch (error) {
    source = null;
    answer = { error: `${error.name}: ${error.message}` };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
