import { expect, test } from "bun:test";
import { Type } from "@sinclair/typebox";
import { nullable } from "./input.ts";
import { operation, plainSchema } from "./openapi.ts";

const shown = (schema: Parameters<typeof Type.Array>[0]) => {
  const described = operation({
    summary: "x",
    tag: "Agents",
    response: { description: "x", schema, example: { anyOf: 1 } },
    errors: [],
  });
  const { responses } = JSON.parse(JSON.stringify(described), (_key, value) => plainSchema(value));
  return responses["200"].content["application/json"].schema;
};
const Letter = Type.Union([Type.Literal("a"), Type.Literal("b")]);

test("a union of texts is shown as an enumeration", () => {
  expect(shown(Letter)).toEqual({ type: "string", enum: ["a", "b"] });
});

test("what may be null keeps its form and gets a second type", () => {
  const name = Type.String({ maxLength: 3 });
  expect<unknown>(shown(nullable(name, "a name"))).toEqual({ type: ["string", "null"], maxLength: 3 });
  expect<unknown>(shown(nullable(Letter, "a letter"))).toEqual({
    type: ["string", "null"],
    enum: ["a", "b", null],
  });
  expect<unknown>(shown(nullable(Type.Literal("a"), "a"))).toEqual({
    type: ["string", "null"],
    enum: ["a", null],
  });
});

test("other unions stay as they are, and so do named schemas", () => {
  const Named = Type.Object({}, { $id: "Named" });
  expect<unknown>(shown(Type.Union([Type.String(), Type.Integer()]))).toEqual({
    anyOf: [{ type: "string" }, { type: "integer" }],
  });
  expect<unknown>(shown(nullable(Named, "x"))).toEqual({
    anyOf: [{ $id: "Named", type: "object", properties: {} }, { type: "null" }],
  });
});
