import { beforeAll, describe, expect, test } from "bun:test";
import { Validator } from "@seriousme/openapi-schema-validator";
import { Type } from "@sinclair/typebox";
import { BASE } from "../../../test/support/network.ts";
import { silentLog } from "../../core/log.ts";
import { createAssets } from "../../http/assets.ts";
import { routes } from "../../http/elysia.ts";
import { operation } from "../../http/openapi.ts";
import { json } from "../../http/responses.ts";
import { createEdge, type Edge } from "../../http/server.ts";
import { parseSettleRequest } from "../../x402/codec.ts";
import { apiDocument } from "./document.ts";
import { docsRoutes } from "./routes.ts";

const Part = Type.Object({ size: Type.Integer() }, { $id: "Part" });
const Thing = Type.Object({ name: Type.String({ "x-expected": "a name" }), parts: Type.Array(Part) }, { $id: "Thing" });

const readThing = operation({
  summary: "Read a thing",
  tag: "Agents",
  path: { id: { description: "Its ID", example: "thing_1" } },
  response: { description: "The thing", schema: Thing, example: { name: "a", parts: [] } },
  errors: ["not_found", "rate_limited"],
});
const makeThing = operation({
  summary: "Make a thing",
  tag: "Agents",
  query: { dry: { description: "Only try", schema: Type.Boolean() } },
  body: { schema: Thing, example: { name: "a", parts: [] } },
  response: { status: "created", description: "Made", schema: Thing, headers: { Location: "Where it is" } },
  errors: ["invalid_request"],
});
const health = operation({
  summary: "Is it alive",
  tag: "Service",
  open: true,
  response: { status: "empty", description: "It is" },
  errors: [],
});

function api() {
  return routes()
    .get("/v1/things/:id", () => json("ok", {}), { detail: readThing })
    .post("/v1/things", () => json("created", {}), { parse: "none", detail: makeThing })
    .get("/.well-known/health", () => json("ok", {}), { detail: health });
}

async function edgeOf(given: ReturnType<typeof api>): Promise<Edge> {
  const app = routes()
    .use(given)
    .use(docsRoutes(given, createAssets(), "1.2.3", BASE));
  return createEdge({
    app,
    log: silentLog,
    authenticate: () => ({ tenant: "t", user: "u", scopes: new Set() }),
  });
}

let edge: Edge;
beforeAll(async () => {
  edge = await edgeOf(api());
});
/** Read to its end, as a browser does: what nobody reads counts as being sent. */
async function get(path: string, headers: Record<string, string> = {}): Promise<Response> {
  const answer = await edge.fetch(new Request(`http://localhost${path}`, { headers }));
  return new Response(answer.body === null ? null : await answer.bytes(), answer);
}

const PAGE_PATHS = ["", "/initializer.js", "/swagger-ui-bundle.js", "/swagger-ui.css", "/style.css", "/favicon.png"];

describe("the Swagger page", () => {
  test("comes with all its assets, each of its type", async () => {
    const types = [];
    for (const path of PAGE_PATHS) {
      const response = await get(`/swagger${path}`);
      expect([path, response.status]).toEqual([path, 200]);
      expect((await response.bytes()).byteLength).toBeGreaterThan(100);
      types.push(response.headers.get("content-type")?.split(";")[0]);
    }
    expect(types).toEqual(["text/html", "text/javascript", "text/javascript", "text/css", "text/css", "image/png"]);
  });

  test("names no other host and may run no inline script", async () => {
    const page = await get("/swagger");
    expect(page.headers.get("content-security-policy")).toStartWith("default-src 'none'; script-src 'self';");
    const text = (await page.text()) + (await (await get("/swagger/initializer.js")).text());
    expect(text.replaceAll(/^ *\/\/.*$/gm, "")).not.toContain("//");
    expect(text).not.toMatch(/<script(?![^>]* src=)/);
    expect(text).toContain("validatorUrl: null");
  });

  test("is not sent again to a copy that is still good, and is sent to a stale one", async () => {
    for (const path of [...PAGE_PATHS, "/json"]) {
      const etag = (await get(`/swagger${path}`)).headers.get("etag") ?? "";
      const again = await get(`/swagger${path}`, { "if-none-match": `"other", W/${etag}` });
      expect([again.status, again.headers.get("etag"), await again.text()]).toEqual([304, etag, ""]);
      expect((await get(`/swagger${path}`, { "if-none-match": '"other"' })).status).toBe(200);
      expect((await get(`/swagger${path}`, { "if-none-match": "*" })).status).toBe(304);
    }
  });

  test("is found by a trailing slash, and nothing else is below it", async () => {
    const redirect = await get("/swagger/");
    expect(new URL(redirect.headers.get("location") ?? "", "http://h/swagger/").pathname).toBe("/swagger");
    for (const path of ["/swagger/index.html", "/swagger/swagger", "/swagger/../../package.json"]) {
      expect((await get(path)).status).toBe(404);
    }
  });
});

describe("the OpenAPI document", () => {
  // biome-ignore lint/suspicious/noExplicitAny: the document is read as its readers would, by path.
  let document: any;
  beforeAll(async () => {
    document = await (await get("/swagger/json")).json();
  });

  test("is valid OpenAPI", async () => {
    const result = await new Validator().validate(structuredClone(document));
    expect(result.errors ?? []).toEqual([]);
    expect(result.valid).toBe(true);
    const broken = structuredClone(document);
    broken.paths["/v1/things"].post.responses["201"].description = 1;
    expect((await new Validator().validate(broken)).valid).toBe(false);
  });

  test("describes every route of the API, the facilitator's, and no other", () => {
    expect(document.openapi).toBe("3.1.0");
    expect(document.info.version).toBe("1.2.3");
    expect(Object.keys(document.paths).sort()).toEqual([
      "/.well-known/health",
      "/settle",
      "/supported",
      "/v1/things",
      "/v1/things/{id}",
    ]);
  });

  test("adds what every operation with a token may answer", () => {
    const { responses, security, parameters } = document.paths["/v1/things/{id}"].get;
    expect(Object.keys(responses)).toEqual(["200", "401", "404", "429", "500", "503"]);
    expect([responses["401"].content, responses["500"].content]).toEqual([undefined, undefined]);
    expect(Object.keys(responses["429"].headers)).toEqual(["Retry-After", "X-Request-ID"]);
    expect(security).toEqual([{ bearer: [] }]);
    expect(document.components.securitySchemes.bearer.scheme).toBe("bearer");
    expect(document.components.securitySchemes.clientCertificate.type).toBe("mutualTLS");
    expect(parameters).toEqual([
      {
        name: "id",
        in: "path",
        description: "Its ID",
        required: true,
        schema: { type: "string" },
      },
    ]);
    expect(document.paths["/.well-known/health"].get.security).toEqual([]);
  });

  test("shows a named schema once, nested ones too, without what only the reader of bodies needs", () => {
    const { requestBody, responses } = document.paths["/v1/things"].post;
    const reference = { $ref: "#/components/schemas/Thing" };
    expect(requestBody.content["application/json"]).toEqual({
      schema: reference,
      example: { name: "a", parts: [] },
    });
    expect(responses["201"].content["application/json"].schema).toEqual(reference);
    expect(Object.keys(document.components.schemas)).toEqual(expect.arrayContaining(["Error", "Part", "Thing"]));
    expect(document.components.schemas.Thing.properties).toEqual({
      name: { type: "string" },
      parts: { type: "array", items: { $ref: "#/components/schemas/Part" } },
    });
  });

  test("puts the facilitator's endpoints where they are, which is not here", async () => {
    const { servers, security, requestBody, responses } = document.paths["/settle"].post;
    expect(servers.map(({ url }: { url: string }) => url)).toEqual(["{facilitator_url}"]);
    expect(security).toEqual([{ clientCertificate: [] }]);
    expect(Object.keys(responses)).toEqual(["200", "400", "403", "429", "500", "503"]);
    const { example } = requestBody.content["application/json"];
    const parsed = parseSettleRequest(example);
    expect(parsed).toMatchObject({ ok: true, value: { payment: { network: "base" } } });
    const supported = document.paths["/supported"].get;
    expect([supported.servers.length, supported.security]).toEqual([2, []]);
    expect((await get("/supported")).status).toBe(404);
    expect((await edge.fetch(new Request("http://localhost/settle", { method: "POST" }))).status).toBe(404);
  });

  test("is refused when two different schemas have one name", async () => {
    const other = operation({
      ...OTHER,
      response: { description: "x", schema: OTHER_PART },
    });
    const app = api().get("/v1/other", () => json("ok", {}), { detail: other });
    await expect(apiDocument(app, "1", BASE)).rejects.toThrow("two schemas are called Part");
  });
});

const OTHER = { summary: "Other", tag: "Agents", errors: [] } as const;
const OTHER_PART = Type.Object({ weight: Type.Integer() }, { $id: "Part" });
