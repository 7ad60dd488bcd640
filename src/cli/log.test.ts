import { expect, test } from "bun:test";
import { Fault } from "../core/fault.ts";
import { type LogOptions, openLog } from "./log.ts";

function record(options: Partial<LogOptions> = {}) {
  const chunks: Buffer[] = [];
  const write = (bytes: Uint8Array) => chunks.push(Buffer.from(bytes)) && bytes.length;
  const log = openLog({
    level: "info",
    format: "json",
    clock: { now: () => 1_700_000_000_123 },
    write,
    ...options,
  });
  return { log, chunks, text: () => Buffer.concat(chunks).toString() };
}

test("an event is one line of JSON with its time, level and fields", () => {
  const { log, text } = record();
  log.info("call ended", { tenant: "acme", ms: 3, big: 12n, none: null, absent: undefined, list: [1, "a"] });
  log.flush();
  expect(text()).toEndWith("}\n");
  expect(JSON.parse(text())).toEqual({
    time: "2023-11-14T22:13:20.123Z",
    level: "info",
    event: "call ended",
    tenant: "acme",
    ms: 3,
    big: "12",
    none: null,
    list: [1, "a"],
  });
});

test("lines of plain fields, of none and of others are of one form, each with its own time", () => {
  let now = 1_700_000_000_123;
  const { log, text } = record({ clock: { now: () => now } });
  log.info("none");
  log.info("plain", { a: "ä\n\ud800", b: 0.5, c: "x".repeat(4096) });
  now += 1;
  log.info("gone", { absent: undefined });
  log.info("long", { c: "x".repeat(4097) });
  log.info("endless", { infinite: Infinity, b: true });
  log.flush();
  const at = (milliseconds: number) => ({ time: `2023-11-14T22:13:20.${milliseconds}Z`, level: "info" });
  expect(
    text()
      .trimEnd()
      .split("\n")
      .map((line) => JSON.parse(line)),
  ).toEqual([
    { ...at(123), event: "none" },
    { ...at(123), event: "plain", a: "ä\n\ud800", b: 0.5, c: "x".repeat(4096) },
    { ...at(124), event: "gone" },
    { ...at(124), event: "long", c: `${"x".repeat(4096)}…` },
    { ...at(124), event: "endless", infinite: "Infinity", b: true },
  ]);
});

test("events below the level are not printed", () => {
  const { log, text } = record({ level: "warn" });
  log.debug("a");
  log.info("b");
  log.warn("c");
  log.flush();
  expect(text().split("\n").length).toBe(2);
});

test("what comes from outside can't forge a line, in either format", () => {
  for (const format of ["json", "pretty"] as const) {
    const { log, text } = record({ format });
    log.info("seen", { path: '/a\n{"level":"error"}\u001b[2J\u009b31m\u2028\u202e' });
    log.flush();
    expect(text().trimEnd().split("\n").length).toBe(1);
    expect(
      text()
        .trimEnd()
        .replaceAll(/\p{Cc}\[(90|32|0)m/gu, ""),
    ).not.toMatch(/[\p{Cc}\p{Cf}\u2028\u2029]/u);
    if (format === "json") expect(JSON.parse(text()).path).toBe('/a\n{"level":"error"}\u001b[2J\u009b31m\u2028\u202e');
  }
});

test("an error is printed with its message, its causes and where it was thrown", () => {
  const cause = Object.assign(new Error("disk full"), { code: "SQLITE_FULL" });
  const fault = new Fault("unavailable", "try again later", { cause });
  const { log, text } = record();
  log.error("write failed", { error: fault });
  const { error } = JSON.parse(text());
  expect(error.message).toBe("Fault: try again later");
  expect(error.causes).toEqual(["Error: disk full (SQLITE_FULL)"]);
  expect(error.stack).toContain("log.test.ts");
});

test("fields that JSON can't hold or that are huge leave a line all the same", () => {
  const loop: Record<string, unknown> = {};
  loop["self"] = loop;
  const { log, text } = record();
  log.info("odd", {
    loop,
    nan: Number.NaN,
    infinite: Infinity,
    long: "x".repeat(100_000),
    symbol: Symbol("s"),
  });
  log.flush();
  expect(text().length).toBeLessThan(5000);
  expect(JSON.parse(text())).toMatchObject({ loop: "unprintable", nan: "NaN", infinite: "Infinity" });
});

test("lines of the log are written together, an error at once", () => {
  const { log, chunks } = record();
  for (let line = 0; line < 10; line++) log.info("line");
  expect(chunks.length).toBe(0);
  log.error("stop");
  expect(chunks.length).toBe(1);
});

test("a slow reader gets everything in order, later", () => {
  let room = 10;
  const taken: Buffer[] = [];
  const write = (bytes: Uint8Array) => {
    if (room === 0) throw Object.assign(new Error("again"), { code: "EAGAIN" });
    const size = Math.min(room, bytes.length);
    room -= size;
    taken.push(Buffer.from(bytes.subarray(0, size)));
    return size;
  };
  const { log } = record({ write });
  log.info("first");
  log.flush();
  log.info("second");
  log.flush();
  expect(Buffer.concat(taken).length).toBe(10);
  room = 1000;
  log.flush();
  const lines = Buffer.concat(taken).toString().trimEnd().split("\n");
  expect(lines.map((line) => JSON.parse(line).event)).toEqual(["first", "second"]);
});

test("a reader that never reads costs bounded memory, and the loss is told", () => {
  let stuck = true;
  let text = "";
  const write = (bytes: Uint8Array) => {
    if (stuck) throw Object.assign(new Error("again"), { code: "EAGAIN" });
    text += Buffer.from(bytes).toString();
    return bytes.length;
  };
  const { log } = record({ write });
  for (let line = 0; line < 10_000; line++) log.info("line", { filler: "x".repeat(1000) });
  stuck = false;
  log.flush();
  expect(text.length).toBeLessThan(5_000_000);
  expect(text).toContain('"event":"log_lines_dropped","count":');
});

test("no warning is dropped for lines of a lower level, and memory is bounded for them too", () => {
  let stuck = true;
  let text = "";
  const write = (bytes: Uint8Array) => {
    if (stuck) throw Object.assign(new Error("again"), { code: "EAGAIN" });
    text += Buffer.from(bytes).toString();
    return bytes.length;
  };
  const { log } = record({ write });
  const filler = "x".repeat(1000);
  for (let line = 0; line < 10_000; line++) log.info("line", { filler });
  for (let line = 0; line < 1000; line++) log.warn("warning", { line, filler });
  for (let line = 0; line < 10_000; line++) log.info("line", { filler });
  log.error("error");
  stuck = false;
  log.flush();
  expect(text.match(/"event":"warning"/g)).toHaveLength(1000);
  expect(text).toContain('"event":"error"');
  text = "";
  stuck = true;
  for (let line = 0; line < 20_000; line++) log.warn("warning", { filler });
  stuck = false;
  log.flush();
  expect(text.length).toBeLessThan(10_000_000);
  expect(text).toContain('"event":"log_lines_dropped","count":');
});

test("a closed or full standard error is survived", () => {
  const write = () => {
    throw Object.assign(new Error("no space"), { code: "ENOSPC" });
  };
  const { log } = record({ write });
  log.error("lost");
  log.flush();
});

test("lines that are held are written when the process exits", async () => {
  const script = `
    import { openLog } from ${JSON.stringify(`${import.meta.dir}/log.ts`)};
    import { systemClock } from ${JSON.stringify(`${import.meta.dir}/../core/time.ts`)};
    openLog({ level: "info", format: "json", clock: systemClock }).info("last words");
    process.exit(3);`;
  const child = Bun.spawn([process.execPath, "-e", script], { stderr: "pipe" });
  expect(await new Response(child.stderr).text()).toContain('"event":"last words"');
  expect(await child.exited).toBe(3);
});
