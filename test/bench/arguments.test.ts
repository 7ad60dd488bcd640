import { expect, test } from "bun:test";
import { parseArguments } from "./arguments.ts";

const PARTS = ["accepts", "gas"];
const parse = (line: string) => parseArguments(line.split(" ").filter(Boolean), PARTS);

test("all parts run for the usual time when nothing is said", () => {
  expect(parse("")).toEqual({ chosen: PARTS, seconds: 4, json: null, against: null });
});

test("parts and options come in any order", () => {
  expect(parse("gas --seconds 1 --against old.json --json new.json")).toEqual({
    chosen: ["gas"],
    seconds: 1,
    json: "new.json",
    against: "old.json",
  });
});

test("what means nothing is said, and never run without it", () => {
  for (const line of [
    "speed",
    "--fast 1",
    "--seconds",
    "--json --against",
    "--seconds 0",
    "--seconds 61",
    "--seconds x",
    "6",
  ]) {
    expect([line, typeof parse(line)]).toEqual([line, "string"]);
  }
});
