// Files that go with the next message: texts, and pictures where the model takes them.

const LONGEST_TEXT_BYTES = 1 << 20, LARGEST_PICTURE_BYTES = 8 << 20, PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

let attached = [];

async function attach(files, takesPictures) {
  const [found, problems] = await read(files, (file) => (PICTURES.includes(file.type) ? pictureOf(file, takesPictures) : textOf(file)));
  attached.push(...found);
  drawAttached();
  setText(find("#kept"), problems);
}

// Reads files. Returns what `readOne` made of them, and a line about those that it refused.
async function read(files, readOne) {
  const found = [], problems = [];
  for (const file of files) {
    try {
      found.push(await readOne(file));
    } catch (problem) {
      problems.push(`${file.name}: ${problem.message}`);
    }
  }
  return [found, problems.join("; ")];
}

async function pictureOf(file, takesPictures) {
  if (!takesPictures) throw new Error("this model takes no pictures");
  if (file.size > LARGEST_PICTURE_BYTES) throw new Error(`a picture may have ${bytes(LARGEST_PICTURE_BYTES)}`);
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error("it cannot be read")));
    reader.readAsDataURL(file);
  });
  return { name: file.name, url };
}

async function textOf(file) {
  if (file.size > LONGEST_TEXT_BYTES) throw new Error(`a text may have ${bytes(LONGEST_TEXT_BYTES)}`);
  const data = await file.arrayBuffer().catch(() => {
    throw new Error("it cannot be read");
  });
  let text = "\0";
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(data);
  } catch {
    // It is refused below.
  }
  if (text.includes("\0")) throw new Error("it is no text in UTF-8");
  return { name: file.name, text };
}

function drawAttached() {
  find("#attached").replaceChildren(...attached.map((one) => make("li", {}, one.name, " ",
    make("button", { type: "button", "aria-label": `Remove ${one.name}`, onclick: () => {
      attached = attached.filter((other) => other !== one);
      drawAttached();
      find("#text").focus();
    } }, "✕"))));
}

// Takes the attached files as a part of a message. Texts come first, so that another question about them restores them.
function takeAttached(text) {
  const texts = attached.filter((one) => "text" in one).map((one) => fenced(one.name, one.text));
  const pictures = attached.filter((one) => "url" in one);
  attached = [];
  drawAttached();
  return { content: [...texts, text].filter(Boolean).join("\n\n"), ...(pictures.length ? { pictures } : {}) };
}

// A file as a block of code whose fence is longer than those in it.
function fenced(name, text) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1), end = text.endsWith("\n") || !text ? "" : "\n";
  return `${name}:\n${fence}\n${text}${end}${fence}`;
}
