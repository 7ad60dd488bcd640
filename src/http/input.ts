// How routes read a request: its JSON body and its query parameters, checked. Anything wrong becomes a Fault that names the
// field.
import type { ObjectOptions, SchemaOptions, Static, TObject, TProperties, TSchema } from "@sinclair/typebox";
import { Type } from "@sinclair/typebox";
import type { TypeCheck, ValueError, ValueErrorIterator } from "@sinclair/typebox/compiler";
import { TypeCompiler, ValueErrorType } from "@sinclair/typebox/compiler";
import { Fault, invalidField } from "../core/fault.ts";
import { suggest } from "../core/text.ts";
import { parseDateTime } from "../core/time.ts";
import { MAX, PAGE_LIMIT_DEFAULT } from "../kernel/limits.ts";
import { readJson } from "../wire/json.ts";
import type { Operation } from "./openapi.ts";
import { scopeOf } from "./server.ts";

/** Up to this size a body takes little memory once it is parsed. */
const SMALL_BYTES = 16_384;

interface BodyOptions {
  readonly freeField?: string;
  /** What the requests are about: its fields that this one does not take are told as read-only. */
  readonly resource?: TObject;
  /** Fields that other requests take, each with what to do instead. */
  readonly elsewhere?: ReadonlyMap<string, string>;
}

/** @throws Fault `invalid_request` unless the request says that its body is JSON */
export function requireJsonType(request: Request): void {
  if (/^application\/json\s*(;|$)/i.test(request.headers.get("content-type") ?? "")) return;
  throw new Fault("invalid_request", "content-type: must be application/json");
}

/** Reads a request's JSON body, checks it and passes it to `use`. Few large bodies are held at a time, each until `use` has ended. */
export function withBody<T extends TSchema>(schema: T, { freeField, ...known }: BodyOptions = {}) {
  // Compiled for the first body: one takes a few milliseconds, and compiling all of them took a tenth of every start.
  let checker: TypeCheck<T> | null = null;

  function checked(value: unknown): Static<T> {
    checker ??= TypeCompiler.Compile(schema);
    if (checker.Check(value)) return value;
    const problems = checker.Errors(value);
    throw describe(problems.First(), problems, known);
  }

  return async <R>(request: Request, use: (value: Static<T>) => Promise<R>): Promise<R> => {
    requireJsonType(request);
    const { caller, intake } = scopeOf(request);
    const { tenant } = caller;
    const { promise: released, resolve: release } = Promise.withResolvers<void>();
    try {
      const bytes = await intake.readBytes(request, tenant, MAX.managementBodyBytes, { until: released });
      const work = async () => use(await readJson(bytes, freeField ?? null, tenant, checked));
      return await (bytes.length > SMALL_BYTES ? intake.largeBodies(tenant, work) : work());
    } finally {
      release();
    }
  };
}

export function bodyReader<T extends TSchema>(schema: T, options: BodyOptions = {}) {
  const use = withBody(schema, options);
  return (request: Request): Promise<Static<T>> => use(request, async (value) => value);
}

const parentOf = (path: string) => path.slice(0, path.lastIndexOf("/"));
const fieldOf = (path: string) => path.slice(1).replaceAll("/", ".").replaceAll("~1", "/").replaceAll("~0", "~");

/** The known field that an unknown one may be meant as: near by its letters, or the only one that has all of its words. */
function meantBy({ path, schema }: ValueError): string | null {
  const field = path.slice(path.lastIndexOf("/") + 1);
  const known = Object.keys(schema["properties"]);
  const longer = known.filter((name) => `_${name}_`.includes(`_${field}_`));
  return suggest(field, known) ?? (longer.length === 1 ? (longer[0] ?? null) : null);
}

/**
 * The problem of missing fields, or of the unknown field beside them that is near to a known one, since that is the misspelt one.
 * @param later the problems after it: first those of missing fields of the same object, then its unknown fields
 */
function missing({ path }: ValueError, later: ValueErrorIterator): Fault {
  const fields = new Set([fieldOf(path)]);
  for (let left = MAX.jsonKeysCompared; left > 0; ) {
    const next = later.First();
    if (next === undefined || parentOf(next.path) !== parentOf(path)) break;
    if (next.type === ValueErrorType.ObjectRequiredProperty) {
      fields.add(fieldOf(next.path));
      continue;
    }
    const meant = next.type === ValueErrorType.ObjectAdditionalProperties ? meantBy(next) : null;
    if (meant !== null) return unknownField(fieldOf(next.path), meant);
    left--;
  }
  return invalidField([...fields].join(", "), "required");
}

const unknownField = (field: string, meant: string | null, known: readonly string[] = []): Fault =>
  invalidField(field, `unknown field; ${meantHint(meant, known)}`);

/** @param meant the known name that an unknown one may be meant as, or null */
function meantHint(meant: string | null, known: readonly string[]): string {
  if (meant !== null) return `did you mean ${meant}?`;
  return known.length === 0 ? "none is taken here" : `known here: ${known.join(", ")}`;
}

const KINDS: ReadonlyMap<ValueErrorType, string> = new Map([
  [ValueErrorType.String, "a string"],
  [ValueErrorType.Boolean, "true or false"],
  [ValueErrorType.Number, "a number"],
  [ValueErrorType.Integer, "an integer"],
  [ValueErrorType.Array, "an array"],
  [ValueErrorType.Object, "a JSON object"],
]);

/** @param later the problems after `error`, which are not looked for before they are asked for */
function describe(
  error: ValueError | undefined,
  later: ValueErrorIterator,
  { resource, elsewhere }: Pick<BodyOptions, "resource" | "elsewhere"> = {},
): Fault {
  if (error === undefined) return new Fault("invalid_request", "body: invalid");
  // For "a value or null", the problem inside the value says more than "neither of the two".
  const [inside] = error.type === ValueErrorType.Union ? error.errors : [];
  const inner = inside?.First();
  if (inside && inner && inner.path.length > error.path.length) return describe(inner, inside);
  const field = fieldOf(error.path);
  if (error.type === ValueErrorType.ObjectAdditionalProperties) {
    const other = elsewhere?.get(field);
    if (other !== undefined) return invalidField(field, other);
    if (resource !== undefined && Object.hasOwn(resource.properties, field)) return invalidField(field, "is read-only");
    return unknownField(field, meantBy(error), Object.keys(error.schema["properties"]));
  }
  if (error.type === ValueErrorType.ObjectRequiredProperty) return missing(error, later);
  if (field === "") return new Fault("invalid_request", "body: must be a JSON object");
  const expected: unknown = error.schema["x-expected"];
  const wanted = typeof expected === "string" ? expected : KINDS.get(error.type);
  return invalidField(field, wanted === undefined ? error.message.toLowerCase() : `must be ${wanted}`);
}

/** A schema of an object with exactly these fields. The API document shows it once, under its name. */
export const shape = <P extends TProperties>(name: string, fields: P, options: ObjectOptions = {}) =>
  Type.Object(fields, { $id: name, additionalProperties: false, ...options });

export const optional = <P extends TProperties>(fields: P) => Type.Partial(Type.Object(fields)).properties;

export const DateTime = Type.String({ format: "date-time" });

export const timestamp = (description: string) => Type.String({ format: "date-time", description });

/** `T` or null. A schema that the API document shows by its name says nothing of the field, which so has options of its own. */
export const nullable = <T extends TSchema>(schema: T, expected: string, options: SchemaOptions = {}) =>
  Type.Union([schema, Type.Null()], { "x-expected": `${expected} or null`, ...options });

/** @throws Fault `invalid_request` for a parameter that the route does not take, which would be a filter that filters nothing */
export function queryOf(request: Request, { queryNames }: Pick<Operation, "queryNames">): URLSearchParams {
  const start = request.url.indexOf("?");
  const query = new URLSearchParams(start === -1 ? "" : request.url.slice(start + 1));
  for (const name of query.keys()) {
    if (queryNames.includes(name)) continue;
    const meant = name === "" ? null : suggest(name, queryNames);
    throw invalidField(name === "" ? "query" : name, `unknown parameter; ${meantHint(meant, queryNames)}`);
  }
  return query;
}

/** A query parameter that must be one of `values`. */
export function choiceOf<T extends string>(query: URLSearchParams, name: string, values: readonly T[]): T | null {
  const given = query.get(name);
  if (given === null) return null;
  const value = values.find((candidate) => candidate === given);
  if (value === undefined) throw invalidField(name, `must be one of ${values.join(", ")}`);
  return value;
}

/** A query parameter that must be an RFC 3339 date-time: milliseconds since the epoch. */
export function dateTime(query: URLSearchParams, name: string): number | null {
  const given = query.get(name);
  if (given === null) return null;
  const time = parseDateTime(given);
  if (time === null) throw invalidField(name, "must be an RFC 3339 date-time with a time zone");
  return time;
}

export const LIMIT_QUERY = {
  limit: {
    description: `How many at most, 1 to ${MAX.pageItems}; others are clamped.`,
    schema: Type.Integer({ minimum: 1, maximum: MAX.pageItems, default: PAGE_LIMIT_DEFAULT }),
  },
};

export const PAGE_QUERY = {
  ...LIMIT_QUERY,
  offset: { description: "How many to skip.", schema: Type.Integer({ minimum: 0, default: 0 }) },
};

/** The schemas of the limit in effect and of the offset, as a page repeats them. */
export const LIMIT_FIELD = {
  limit: Type.Integer({ minimum: 1, maximum: MAX.pageItems, description: "The limit that was applied." }),
};
export const PAGE_FIELDS = {
  total: Type.Integer({ minimum: 0, description: "How many match in all." }),
  ...LIMIT_FIELD,
  offset: Type.Integer({ minimum: 0, description: "How many were skipped." }),
};

export const limitOf = (query: URLSearchParams): number =>
  clampedInteger(query, "limit", PAGE_LIMIT_DEFAULT, 1, MAX.pageItems);

export function page(query: URLSearchParams): { limit: number; offset: number } {
  return { limit: limitOf(query), offset: clampedInteger(query, "offset", 0, 0, Number.MAX_SAFE_INTEGER) };
}

function clampedInteger(query: URLSearchParams, name: string, fallback: number, min: number, max: number): number {
  const given = query.get(name);
  if (given === null) return fallback;
  if (!/^[+-]?\d+$/.test(given.trim())) throw invalidField(name, "must be an integer");
  return Math.min(Math.max(Number(given), min), max);
}
